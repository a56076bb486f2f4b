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


def meta_of(fields: tuple[Any, ...]) -> PageMeta:
    """PageMeta from the fields of a record, as the core gives them."""
    if fields[7] is None:
        return PageMeta(*fields)
    return PageMeta(*(*fields[:7], PageKey(*fields[7]), fields[8]))


def slot_and_meta(handle: Any, fields: tuple[Any, ...]) -> tuple[Slot, PageMeta]:
    """What a look-up gives, from the core's answer."""
    meta = meta_of(fields)
    return Slot(handle, meta.stored_bytes), meta


def entry_of(value: bytes) -> RecordEntry:
    """Reads one entry of the index. Raises PageCorruptError when it is none."""
    fields, *place = _core.index_fields(value)
    return RecordEntry(meta_of(fields), value, *place)
