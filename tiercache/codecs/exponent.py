"""The exponent codec: what a bf16 page can lose without losing a bit. The default from host to disk."""

from __future__ import annotations

import math
import threading

import numpy as np
import numpy.typing as npt
import torch

from tiercache import _core
from tiercache._core import ExponentTable
from tiercache.codecs.base import ByteArray, Codec
from tiercache.codecs.const import plane_width
from tiercache.codecs.dispatch import check_threads, resolve_instructions
from tiercache.codecs.tables import ID_BYTES, TABLE_BYTES, Place, TableStore, pack_table, unpack_table
from tiercache.codecs.views import contiguous_bytes, num_tensor_bytes, require_room, writable_bytes
from tiercache.entry import PageKey
from tiercache.errors import CodecError

_PLANES, _OWN_TABLE, _NAMED_TABLE = 0, 3, 4  # numbers are never given again to another format
_HALF = 0x10  # fp32 whose lower halves are zero: the upper halves are coded as bf16
_TRAIN_BLOCKS = 4
_DRIFT = 1.02  # a page whose exponents take more than this over a fresh table gets its own
_MOVED_PAGES = 4  # pages in a row that drifted before (layer, kind) gets a new version
_RETRAIN_PAGES = 256  # every so many pages of a place, all predictions are tried again

Words = npt.NDArray[np.uint16]


def block_columns(shape: tuple[int, ...]) -> int:
    """Row length of the blocks of a page: its last dimension, made a multiple of 64 where that is short."""
    last = shape[-1] if shape else 1
    cols = math.lcm(max(last, 1), 64)
    if (cols == last and cols <= 65536) or cols <= 4096:
        return cols if math.prod(shape) >= cols else 64
    return 64


class ExponentCodec(Codec):
    """Sign and mantissa as a byte, the exponent as a short code of its distance from a prediction.

    The first byte says how the page is coded; then its table, or the id of one in the table store; then the
    body of `codec_exponent.hpp`. Other dtypes are stored as the const codec stores them, fp32 made from bf16
    as its upper halves.

    Args:
        tables: where tables are kept; without one each codec has its own in memory and pages carry theirs.
        instructions: "auto", "avx512", "avx2" or "portable"; the payload does not depend on it.
        threads: how many work on one page; the payload does not depend on it.

    Raises:
        ConfigError: the processor cannot run these instructions, or `threads` is below 1.
    """

    name = "exponent"

    def __init__(
        self, *, tables: TableStore | None = None, instructions: str = "auto", threads: int = 1
    ) -> None:
        self.tables = TableStore() if tables is None else tables
        self._isa = resolve_instructions(instructions)
        self._threads = check_threads(threads)
        self._lock = threading.Lock()
        self._moved: dict[Place, int] = {}
        self._pages: dict[Place, int] = {}
        self._seen: dict[bytes, ExponentTable] = {}

    def max_encoded_bytes(self, dtype: torch.dtype, shape: tuple[int, ...]) -> int:
        """The tensor's bytes, the table's, and what the blocks' heads and channels' means may take."""
        raw = num_tensor_bytes(dtype, shape)
        coded = int(_core.exponent_bound(raw // 2, block_columns(shape))) if raw else 0
        return max(raw, coded) + TABLE_BYTES + 2

    def encode(self, tensor: torch.Tensor, out: ByteArray, key: PageKey | None = None) -> int:
        """Encodes into `out`; returns the payload's size in bytes."""
        data = contiguous_bytes(tensor)
        shape = tuple(tensor.shape)
        require_room(self.name, out, self.max_encoded_bytes(tensor.dtype, shape))
        words, flag = _bf16_words(data, tensor.dtype)
        if words is not None and words.size >= 64:
            cols = block_columns(shape)
            place = (-1, f"columns {cols}") if key is None else (key.layer, key.kind)
            used = self._encode_words(words, cols, place, out)
            if used < data.size:
                out[0] |= flag
                return used
        out[0] = _PLANES
        return 1 + int(_core.planes_encode(data, plane_width(tensor.dtype), out[1:]))

    def decode(self, payload: ByteArray, out: torch.Tensor) -> None:
        """Fills `out`. Raises CodecError when the payload is malformed or names an unknown table."""
        target = writable_bytes(out)
        if payload.size == 0:
            raise CodecError("exponent payload is empty")
        if payload[0] == _PLANES:
            _core.planes_decode(payload[1:], plane_width(out.dtype), target)
            return
        cols = block_columns(tuple(out.shape))
        kind = int(payload[0])
        if kind & _HALF and out.dtype == torch.float32:
            halves = target.view(np.uint16)
            upper = np.empty(out.numel(), np.uint16)
            self._decode_words(kind & ~_HALF, payload, cols, upper)
            halves[0::2] = 0
            halves[1::2] = upper
            return
        if kind & _HALF or out.dtype != torch.bfloat16:
            raise CodecError("exponent payload of another dtype", got=out.dtype)
        self._decode_words(kind, payload, cols, target.view(np.uint16))

    def _encode_words(self, words: Words, cols: int, place: Place, out: ByteArray) -> int:
        known = self.tables.current(place)
        if known is None:
            table = self._train(words, cols)
            known = (self.tables.publish(place, table), table)
        id_bytes, table = known
        counts = np.zeros(257, np.uint64)
        used = self._write(words, cols, table, id_bytes, out, counts)
        # Other predictions than the table's are only seen by training, so that is done now and then.
        moved = table.cost_bits(counts) > _DRIFT * ExponentTable.fresh_bits(counts)
        if not moved and not self._is_retraining_due(place):
            self._moved.pop(place, None)
            return used
        fresh = self._train(words, cols)
        if not moved and _cost(fresh, words, cols, self._isa) * _DRIFT >= _cost(
            table, words, cols, self._isa
        ):
            return used
        return self._encode_moved(words, cols, place, fresh, out)

    def _is_retraining_due(self, place: Place) -> bool:
        with self._lock:
            self._pages[place] = self._pages.get(place, 0) + 1
            return self._pages[place] % _RETRAIN_PAGES == 2

    def _encode_moved(
        self, words: Words, cols: int, place: Place, fresh: ExponentTable, out: ByteArray
    ) -> int:
        """Encodes a page that the table of its place no longer fits, with one of its own."""
        with self._lock:
            self._moved[place] = self._moved.get(place, 0) + 1
            lasting = self._moved[place] >= _MOVED_PAGES
            if lasting:
                self._moved[place] = 0
        id_bytes = self.tables.publish(place, fresh) if lasting else None
        return self._write(words, cols, fresh, id_bytes, out, None)

    def _write(
        self,
        words: Words,
        cols: int,
        table: ExponentTable,
        id_bytes: bytes | None,
        out: ByteArray,
        counts: npt.NDArray[np.uint64] | None,
    ) -> int:
        if id_bytes is not None and self.tables.durable:
            head = bytes([_NAMED_TABLE]) + id_bytes
        else:
            head = bytes([_OWN_TABLE]) + pack_table(table)
        out[: len(head)] = np.frombuffer(head, np.uint8)
        body = out[len(head) :]
        return len(head) + int(
            _core.exponent_encode(words, cols, table, body, self._isa, self._threads, counts)
        )

    def _train(self, words: Words, cols: int) -> ExponentTable:
        return _core.exponent_train(words, cols, _TRAIN_BLOCKS, self._isa)

    def _decode_words(self, kind: int, payload: ByteArray, cols: int, words: Words) -> None:
        if kind == _NAMED_TABLE:
            head = 1 + ID_BYTES
        elif kind == _OWN_TABLE:
            head = 1 + TABLE_BYTES
        else:
            raise CodecError("exponent payload has no valid first byte", got=kind)
        if payload.size < head:
            raise CodecError("exponent payload ends inside its head", got=payload.size, limit=head)
        named = payload[1:head].tobytes()
        table = self.tables.find(named) if kind == _NAMED_TABLE else self._own_table(named)
        _core.exponent_decode(payload[head:], cols, table, words, self._isa, self._threads)

    def _own_table(self, packed: bytes) -> ExponentTable:
        """The table that a page carries; the last few are kept, since pages of a place carry the same."""
        table = self._seen.get(packed)
        if table is None:
            table = unpack_table(packed)
            with self._lock:
                while len(self._seen) >= 256:
                    self._seen.pop(next(iter(self._seen)))
                self._seen[packed] = table
        return table


def _cost(table: ExponentTable, words: Words, cols: int, isa: int) -> float:
    """Bits an exponent takes with a table on a sample of the page, its means counted."""
    return float(_core.exponent_cost(words, cols, table, _TRAIN_BLOCKS, isa))


def _bf16_words(data: ByteArray, dtype: torch.dtype) -> tuple[Words | None, int]:
    """The page as bf16 words and the flag that says how, or None when it is nothing of the kind."""
    if dtype == torch.bfloat16 and _core.constant_planes(data, 2) == 0:  # a constant byte gains more
        return data.view(np.uint16), 0
    if dtype == torch.float32 and _core.constant_planes(data, 4) == 0b0011 and not data[:2].any():
        return np.ascontiguousarray(data.view(np.uint16)[1::2]), _HALF
    return None, 0
