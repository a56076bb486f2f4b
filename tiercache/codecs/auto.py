"""The auto codec: for each kind of page and tier, whatever makes the page cheapest to bring back."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from tiercache.codecs.base import ByteArray, Codec
from tiercache.codecs.const import ConstCodec
from tiercache.codecs.exponent import ExponentCodec
from tiercache.codecs.raw import RawCodec
from tiercache.codecs.tables import TableStore
from tiercache.codecs.views import contiguous_bytes, num_tensor_bytes, require_room
from tiercache.codecs.window import WindowCodec
from tiercache.codecs.zstd import ZstdCodec
from tiercache.entry import PageKey
from tiercache.errors import CodecError, ConfigError

_REMEASURE_PAGES = 256
_SMALLEST_BYTES = 4096  # below this a page's own costs drown what a codec saves
_OVERLAP_SHARE = 0.1  # of the shorter of reading and decoding, what does not hide behind the longer
# Of what a raw page costs, the most that a coded one may. One page is timed, once, beside whatever else the machine
# does, which moves a time by a seventh; a gain that small may be none, and would come and go with each measurement.
_CLEARLY_CHEAPER = 0.85
_LEAST_RATIO = 1.02  # below it a page is stored raw, whatever was chosen


@dataclass(slots=True)
class Choice:
    """What is known of the pages of one kind: the codec in use and what each candidate measured."""

    codec: str = "raw"
    pages: int = 0
    ratio: dict[str, float] = field(default_factory=dict)
    encode_s_per_byte: dict[str, float] = field(default_factory=dict)
    decode_s_per_byte: dict[str, float] = field(default_factory=dict)


class AutoCodec(Codec):
    """Measures the lossless codecs on a kind's first page, then on every 256th, and uses the cheapest.

    Implementation notes. Pages stream: while one is decoded the next is read. So a page costs the longer of
    reading its payload and decoding it, and a tenth of the shorter, the part that the streams fail to hide; and as
    much for encoding beside writing, which is taken to be as fast as reading. Raw has no coding but a copy. The
    cheapest is looked for at each page, as the tier's speed becomes known, and is used if it costs clearly less than
    raw. The payload is one byte, the codec's number, and that codec's payload, so a page can be decoded whatever `auto`
    has learned since.

    Args:
        read_gbps: how fast the tier below gives bytes back, in 1e9 bytes a second, until that is told.
        tables: table store of the exponent codec.
        instructions, threads: passed on to the codecs.
        clock: seconds, for tests.

    Raises:
        ConfigError: `read_gbps` is not positive, or as the codecs raise it.
    """

    name = "auto"
    minds_speed = True

    def __init__(
        self,
        *,
        read_gbps: float = 3.0,
        tables: TableStore | None = None,
        instructions: str = "auto",
        threads: int = 1,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        native = {"instructions": instructions, "threads": threads}
        self._codecs: list[Codec] = [  # a payload's first byte is an index here: append only
            RawCodec(),
            ConstCodec(),
            WindowCodec(**native),  # type: ignore[arg-type]
            ExponentCodec(tables=tables, **native),  # type: ignore[arg-type]
            ZstdCodec(),
        ]
        self._number = {codec.name: number for number, codec in enumerate(self._codecs)}
        self._clock = clock
        self._lock = threading.Lock()
        self.tell_speed(read_gbps)
        self._choices: dict[tuple[str, torch.dtype], Choice] = {}

    def tell_speed(self, read_gbps: float) -> None:
        """Takes a speed for the tier's from now on. Raises ConfigError unless it is positive."""
        if not read_gbps > 0 or not math.isfinite(read_gbps):
            raise ConfigError("read_gbps", got=read_gbps, limit="> 0")
        with self._lock:
            self._read_s_per_byte = 1e-9 / read_gbps

    def observe(self, num_bytes: int, seconds: float) -> None:
        """Tells how long the tier took to read `num_bytes`; a running mean over about 32 reads."""
        if num_bytes > 0 and seconds > 0:
            with self._lock:
                self._read_s_per_byte += (seconds / num_bytes - self._read_s_per_byte) / 32

    def choices(self) -> dict[str, str]:
        """The codec in use for each kind and dtype that was seen."""
        with self._lock:
            return {f"{kind}/{dtype}": choice.codec for (kind, dtype), choice in self._choices.items()}

    def max_encoded_bytes(self, dtype: torch.dtype, shape: tuple[int, ...]) -> int:
        """One more than the largest of the codecs'."""
        return 1 + max(codec.max_encoded_bytes(dtype, shape) for codec in self._codecs)

    def encode(self, tensor: torch.Tensor, out: ByteArray, key: PageKey | None = None) -> int:
        """Encodes with the codec of this kind of page; returns the payload's size in bytes."""
        require_room(self.name, out, self.max_encoded_bytes(tensor.dtype, tuple(tensor.shape)))
        raw_bytes = num_tensor_bytes(tensor.dtype, tuple(tensor.shape))
        name = "raw"
        if raw_bytes >= _SMALLEST_BYTES:
            name = self._chosen("" if key is None else key.kind, tensor, out[1:], key)
        used = self._codecs[self._number[name]].encode(tensor, out[1:], key)
        if used * _LEAST_RATIO > raw_bytes:  # it does not pay for this page
            name, used = "raw", self._codecs[0].encode(tensor, out[1:], key)
        out[0] = self._number[name]
        return used + 1

    def leaves(self, payload: ByteArray | None, dtype: torch.dtype, key: PageKey, num_bytes: int) -> bool:
        """Whether the page is one that this codec would store just so; no while a measurement is due."""
        with self._lock:
            choice = self._choices.get((key.kind, dtype))
            if num_bytes >= _SMALLEST_BYTES and (choice is None or choice.pages % _REMEASURE_PAGES == 0):
                return False
            name = "raw" if choice is None or not choice.ratio else self._cheapest(choice)
            if (0 if payload is None else int(payload[0])) != self._number[name]:
                return False
            if choice is not None:
                choice.codec = name
                choice.pages += 1
            return True

    def decode(self, payload: ByteArray, out: torch.Tensor) -> None:
        """Decodes with the codec that the first byte names.

        Raises:
            CodecError: the payload is malformed or not of the size of `out`.
        """
        if payload.size == 0 or payload[0] >= len(self._codecs):
            raise CodecError("auto payload names no codec", got=f"{payload.size} bytes")
        self._codecs[int(payload[0])].decode(payload[1:], out)

    def _chosen(self, kind: str, tensor: torch.Tensor, out: ByteArray, key: PageKey | None) -> str:
        with self._lock:
            choice = self._choices.setdefault((kind, tensor.dtype), Choice())
            due = choice.pages % _REMEASURE_PAGES == 0
            choice.pages += 1
        if due:
            self._measure(choice, tensor, out, key)
        with self._lock:
            if choice.ratio:  # else the first page of the kind is being measured
                choice.codec = self._cheapest(choice)
            return choice.codec

    def _measure(self, choice: Choice, tensor: torch.Tensor, out: ByteArray, key: PageKey | None) -> None:
        """Encodes and decodes the page with every candidate."""
        page = tensor.detach().contiguous()
        back = torch.empty_like(page)
        raw_bytes = contiguous_bytes(page).size
        ratio, encode_s_per_byte, decode_s_per_byte = {}, {}, {}
        for codec in self._codecs:
            used = codec.encode(page, out, key)  # the first time it faults memory in, and trains tables
            begin = self._clock()
            codec.encode(page, out, key)
            encoded = self._clock()
            codec.decode(np.asarray(out[:used]), back)
            decoded = self._clock()
            ratio[codec.name] = raw_bytes / used
            encode_s_per_byte[codec.name] = (encoded - begin) / raw_bytes
            decode_s_per_byte[codec.name] = (decoded - encoded) / raw_bytes
        with self._lock:
            choice.ratio, choice.encode_s_per_byte = ratio, encode_s_per_byte
            choice.decode_s_per_byte = decode_s_per_byte

    def _cheapest(self, choice: Choice) -> str:
        smaller = [name for name, ratio in choice.ratio.items() if ratio >= _LEAST_RATIO]
        best = min(smaller, key=lambda name: self._cost(choice, name), default="raw")
        is_clear = self._cost(choice, best) < _CLEARLY_CHEAPER * self._cost(choice, "raw")
        return best if is_clear else "raw"

    def _cost(self, choice: Choice, name: str) -> float:
        """Seconds a byte of the page, written and brought back."""
        moved_s = self._read_s_per_byte / choice.ratio[name]
        return _streamed(moved_s, choice.encode_s_per_byte[name]) + _streamed(
            moved_s, choice.decode_s_per_byte[name]
        )


def _streamed(moved_s: float, coded_s: float) -> float:
    return max(moved_s, coded_s) + _OVERLAP_SHARE * min(moved_s, coded_s)
