"""Records as Python objects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tiercache import _core
from tiercache.entry import PageKey
from tiercache.tiers.base import PageMeta, Slot


@dataclass(frozen=True, slots=True)
class RecordEntry:
    """One entry of the index.

    Attributes:
        value: the entry itself, as the core reads it.
        segment: id of its file.
        offset: of the record's header in that file.
        length: of the whole record, header and padding included.
        created_ns: wall clock of the write.
        hits: reads counted by the processes that closed.
    """

    meta: PageMeta
    value: bytes
    segment: int
    offset: int
    length: int
    created_ns: int
    hits: int


# A look-up of many keys makes thousands of these objects. Their constructors, written in Python, would take most of its
# time: a frozen field is set by a call of its own.
_new_key, _new_tuple = object.__new__, tuple.__new__


def meta_of(fields: tuple[Any, ...]) -> PageMeta:
    """PageMeta from the fields of a record, as the core gives them."""
    digest, namespace, dtype, shape, codec, raw_bytes, stored_bytes, named, persistent = fields
    key = None
    if named is not None:
        key = _new_key(PageKey)
        own = key.__dict__
        own["node"], own["layer"], own["kind"], own["graph"] = named
    meta = (digest, namespace, dtype, shape, codec, raw_bytes, stored_bytes, key, persistent)
    return _new_tuple(PageMeta, meta)


def slot_and_meta(handle: Any, fields: tuple[Any, ...]) -> tuple[Slot, PageMeta]:
    """What a look-up gives, from the core's answer."""
    return _new_tuple(Slot, (handle, fields[6])), meta_of(fields)


def entry_of(value: bytes) -> RecordEntry:
    """Reads one entry of the index. Raises PageCorruptError when it is none."""
    fields, *place = _core.index_fields(value)
    return RecordEntry(meta_of(fields), value, *place)
