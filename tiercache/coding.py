"""How the pages of each kind are coded in each tier, and the one codec whose first encode fixes their values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from tiercache.codec_choice import REST, CodecChoice, by_kind
from tiercache.codecs import CODECS
from tiercache.codecs.base import Codec
from tiercache.codecs.factory import CodecFactory, read_gbps
from tiercache.entry import Entry, PageKey
from tiercache.errors import CodecError, ConfigError, PageCorruptError
from tiercache.payload import Source, as_tensor, bytes_of, page_meta
from tiercache.tiers.base import ByteArray, PageMeta, Tier
from tiercache.tiers.disk import DiskTier

# Kinds that a lossy codec given for all applies to: what attention reads, and nothing that pop recomputes from.
LOSSY_KINDS = ("key", "value", "state")


@dataclass(frozen=True, slots=True)
class Coding:
    """The codecs of one kind of page.

    Attributes:
        by_tier: codec by the tier's name; None stands for raw bytes.
        fixes: the lossy one among them. A page's values are those of its first encode by it, in every tier.
    """

    by_tier: Mapping[str, Codec | None] = field(default_factory=dict)
    fixes: Codec | None = None

    def at(self, tier: Tier) -> Codec | None:
        """The codec of pages in a tier."""
        return self.by_tier.get(tier.name)

    def exact(self) -> Coding:
        """The same without what is lossy."""
        return Coding(
            {tier: codec if codec and codec.lossless else None for tier, codec in self.by_tier.items()}
        )


RAW = Coding()


class PageCodecs:
    """The codecs of a store, by kind of page and tier.

    Args:
        choice: as `StoreConfig.codec`.
        factory: makes them.

    Raises:
        ConfigError: an unknown codec, a lossy one for gradient pages, or two lossy ones for one kind.
    """

    def __init__(self, choice: CodecChoice, factory: CodecFactory) -> None:
        table = by_kind(choice)
        self._factory = factory
        self._made: dict[tuple[str, str], Codec] = {}
        self._decoders: dict[str, Codec] = {}
        self._codings = {kind: self._coding(kind, names) for kind, names in table.items()}
        self._rest = self._codings.pop(REST)
        factory.check_used({name for names in table.values() for name in names.values()})

    def _coding(self, kind: str, names: Mapping[str, str]) -> Coding:
        by_tier = {tier: None if name == "raw" else self._codec(name, tier) for tier, name in names.items()}
        lossy = {codec.name: codec for codec in by_tier.values() if codec is not None and not codec.lossless}
        if lossy and kind.startswith("grad_"):
            raise ConfigError(
                f"codec: gradient pages of kind {kind!r} are never lossy",
                got=", ".join(lossy),
                remedy="name a lossless codec for them",
            )
        if len(lossy) > 1:
            raise ConfigError(
                f"codec of {kind!r}: two lossy codecs; a page's values are fixed once",
                got=", ".join(lossy),
                remedy="name one of them, or a lossless codec beside it",
            )
        return Coding(by_tier, next(iter(lossy.values()), None))

    def _codec(self, name: str, tier: str) -> Codec:
        """One object a name, but one a tier where that is what the codec goes by."""
        for place in ((name, ""), (name, tier)):
            if place in self._made:
                return self._made[place]
        codec = self._factory.create(name)
        self._made[name, tier if codec.minds_speed else ""] = codec
        return codec

    def attach(self, tiers: Sequence[Tier]) -> None:
        """Tells codecs how fast tiers read, and keeps tables beside the index of a disk tier that keeps pages."""
        for tier in tiers:
            if isinstance(tier, DiskTier) and tier.durability != "scratch":
                self._factory.tables.keep_in(tier.directories[0], writable=not tier.read_only)
            mine = [codec for (_, of_tier), codec in self._made.items() if of_tier == tier.name]
            speed = read_gbps(tier) if mine else None
            if speed is not None:
                for codec in mine:
                    codec.tell_speed(speed)

    def observe(self, tier: Tier, num_bytes: int, seconds: float) -> None:
        """Tells codecs of a tier how long a read of it took."""
        for (_, of_tier), codec in self._made.items():
            if of_tier == tier.name:
                codec.observe(num_bytes, seconds)

    def of(self, key: PageKey) -> Coding:
        """How a page is coded."""
        coding = self._codings.get(key.kind)
        if coding is not None:
            return coding
        return self._rest if self._rest.fixes is None or key.kind in LOSSY_KINDS else self._rest.exact()

    def differ(
        self, entry: Entry, meta: PageMeta, tier: Tier, into: Tier, payload: ByteArray | None = None
    ) -> bool:
        """Whether a payload of one tier, told where it is in memory, is to be coded anew for another."""
        coding: Coding = entry.coding or RAW
        codec = coding.at(into)
        if codec is coding.at(tier):
            return False
        if codec is None:
            return meta.codec != "raw"
        if meta.codec == "raw" or (payload is not None and meta.codec == codec.name):
            known = None if meta.codec == "raw" else payload
            if codec.leaves(known, entry.dtype, entry.key, entry.num_bytes):
                return False
        return codec.minds_speed or codec.name != meta.codec

    def can_decode(self, meta: PageMeta) -> bool:
        """Whether a record's codec is known."""
        return meta.codec in CODECS

    # Payloads

    def sizes(self, entry: Entry, tier: Tier, *, again: bool) -> list[int]:
        """What `encode` writes to: the payload at its largest, and the page decoded if that is needed.

        Nothing where the page goes down as raw bytes and is not encoded.
        """
        coding: Coding = entry.coding or RAW
        codec = coding.at(tier)
        first = None if again or coding.fixes is codec else coding.fixes
        used = [one for one in (codec, first) if one is not None]
        if not used or (
            codec is not None
            and coding.fixes is None
            and codec.leaves(None, entry.dtype, entry.key, entry.num_bytes)
        ):
            return []
        sizes = [max(one.max_encoded_bytes(entry.dtype, entry.shape) for one in used)]
        decodes = first is not None or (again and codec is not None and not codec.lossless)
        return [*sizes, entry.num_bytes] if decodes else sizes

    def encode(
        self,
        entry: Entry,
        page: torch.Tensor,
        tier: Tier,
        namespace: bytes,
        memory: Sequence[ByteArray],
        *,
        again: bool,
    ) -> Source:
        """The payload of a contiguous CPU tensor for a tier: what the codec makes of it, or its bytes if no smaller.

        `again`: the values are fixed, so a lossy codec is kept only if it gives them back.
        """
        coding: Coding = entry.coding or RAW
        codec = coding.at(tier)
        if not again and coding.fixes is not None and coding.fixes is not codec:
            decoded = as_tensor(memory[1], entry.dtype, entry.shape)
            self.fix(entry, page, decoded, memory)
            page = decoded
        raw = Source.of(bytes_of(page), page_meta(entry, namespace, "raw", entry.num_bytes))
        if codec is None:
            return raw
        size = codec.encode(page, memory[0], entry.key)
        if size >= entry.num_bytes:
            return raw
        payload = memory[0][:size]
        if again and not codec.lossless:
            codec.decode(payload, as_tensor(memory[1], entry.dtype, entry.shape))
            # Not numpy's array_equal, which allocates a page of truth values.
            if not torch.equal(torch.from_numpy(memory[1]), torch.from_numpy(bytes_of(page))):
                return raw
        return Source.of(payload, page_meta(entry, namespace, codec.name, size))

    def fix(
        self, entry: Entry, page: torch.Tensor, out: torch.Tensor, memory: Sequence[ByteArray]
    ) -> ByteArray:
        """Fills `out` with what the lossy codec makes of a CPU tensor: the page's values from now on; the payload."""
        codec: Codec = entry.coding.fixes
        payload = memory[0][: codec.encode(page, memory[0], entry.key)]
        codec.decode(payload, out)
        return payload

    def decode(self, payload: ByteArray, meta: PageMeta, out: torch.Tensor) -> None:
        """Fills a contiguous CPU tensor from a payload.

        Raises:
            PageCorruptError: the payload is not what its codec wrote, or its table is lost.
        """
        if meta.codec == "raw":
            np.copyto(bytes_of(out), payload)
            return
        if meta.codec not in self._decoders:
            self._decoders[meta.codec] = self._factory.create(meta.codec)
        try:
            self._decoders[meta.codec].decode(payload, out)
        except CodecError as error:
            raise PageCorruptError(f"read {meta.key or meta.digest.hex()}: {error}") from error
