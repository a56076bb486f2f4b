"""Options of a store, checked once: sizes, directories, codecs and waits."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tiercache.codec_choice import CodecChoice, by_kind
from tiercache.errors import ConfigError

Size = int | str

DURABILITIES = ("scratch", "process", "power")
_UNITS = {
    "": 1,
    "B": 1,
    **{f"{p}B": 1000**n for n, p in enumerate("KMGT", start=1)},
    **{f"{p}iB": 1024**n for n, p in enumerate("KMGT", start=1)},
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_size(value: Size, what: str = "size") -> int:
    """Bytes of a size given as an integer or as text such as "8GiB", "500 GB" or "4096".

    Raises:
        ConfigError: the text is no size, or the size is negative.
    """
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ConfigError(f"{what}: no size", got=repr(value), remedy='give bytes or text such as "8GiB"')
    if isinstance(value, int):
        if value < 0:
            raise ConfigError(f"{what}: negative size", got=value, limit=">= 0")
        return value
    match = _SIZE.fullmatch(value)
    if match is None or match[2] not in _UNITS:
        raise ConfigError(
            f"{what}: no size", got=repr(value), remedy='give bytes or text such as "8GiB" or "500GB"'
        )
    return int(float(match[1]) * _UNITS[match[2]])


@dataclass(frozen=True, kw_only=True)
class StoreConfig:
    """Options of `open_store`, validated at construction.

    Attributes:
        device: budget of the device tier; a budget in RAM where there is no accelerator.
        host: budget of the host tier, a Tier, or None (or 0) for none.
        staging: host memory for what is on its way between tiers and for what codecs work in; copies wait for it. A
            part of `host`, by default an eighth and 256 MiB at most; without a host tier a budget of its own, by
            default as much as `device` and 256 MiB at most.
        disk: directory or directories of the disk tier, a Tier, or None for none.
        disk_capacity: budget of the disk tier; needed with a directory and an error without one.
        durability: what of the directory a later process finds: "scratch", nothing; "process", persistent pages
            (`TierStore.put`), also after kill -9; "power", the same after a power cut.
        accelerator: "cuda" or another torch device whose copies run on their own stream; None takes each
            tensor's own device; or a `CopyEngine`.
        policy: name of the eviction policy, or names by tier ("device", "host"); the lowest tier has none.
        policy_params: parameters of the policies, by tier.
        admission: which pages may enter a tier that has another below it, one word or by tier: "always",
            "second_hit", "size" or "ghost", as `tiercache.policies.spec.Tier` says. What a tier refuses goes
            further down; a page that is read is on the device until its leases end.
        admission_limit: misses, bytes or missed bytes, by tier; see there.
        codec: one codec for all pages below the device; or by kind of page ("key", "value", "state",
            "layer_input", ...), "*" for the rest, a codec or codecs by tier ("host", "disk"). A lossy codec that is
            not given for a kind by name applies to "key", "value" and "state" pages only. Gradient pages refuse lossy
            codecs.
        codec_instructions: of native codecs: "auto", "avx512", "avx2" or "portable"; payloads don't depend on it.
        codec_threads: that work on one page; payloads don't depend on it.
        namespace: what all pages of this store depend on beside their keys.
        timeout_s: deadline of every wait.
        transfer_threads: worker threads that move pages beside compute.
        trace: Parquet file for the access trace, written at close.
        timeline: Chrome trace JSON file of the transfers, written at close.
    """

    device: Size = "8GiB"
    host: Any = None
    staging: Size | None = None
    disk: Any = None
    disk_capacity: Size | None = None
    durability: str = "scratch"
    accelerator: Any = None
    policy: str | Mapping[str, str] = "planned"
    policy_params: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    admission: str | Mapping[str, str] = "always"
    admission_limit: Mapping[str, Size] = field(default_factory=dict)
    codec: CodecChoice = "raw"
    codec_instructions: str = "auto"
    codec_threads: int = 1
    namespace: bytes = b""
    timeout_s: float = 60.0
    transfer_threads: int = 2
    trace: str | Path | None = None
    timeline: str | Path | None = None
    device_bytes: int = field(init=False)
    staging_bytes: int | None = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "device_bytes", parse_size(self.device, "device"))
        staging = None if self.staging is None else parse_size(self.staging, "staging")
        object.__setattr__(self, "staging_bytes", staging)
        if staging == 0:
            raise ConfigError("staging: copies between tiers need some", got=0, limit="> 0")
        if self.device_bytes == 0:
            raise ConfigError("device: a page that is read needs room on the device", got=0, limit="> 0")
        if isinstance(self.host, int | str):
            parse_size(self.host, "host")
        self._check_disk()
        self._check_policies()
        by_kind(self.codec)
        if not self.timeout_s > 0:
            raise ConfigError("timeout_s: every wait needs a deadline", got=self.timeout_s, limit="> 0")
        if self.transfer_threads < 1:
            raise ConfigError("transfer_threads", got=self.transfer_threads, limit=">= 1")
        if not isinstance(self.namespace, bytes):
            raise ConfigError("namespace: not bytes", got=type(self.namespace).__name__)
        for what in ("trace", "timeline"):
            path = getattr(self, what)
            if path is not None and not Path(path).absolute().parent.is_dir():
                raise ConfigError(f"{what}: its directory does not exist", got=str(path))

    def policy_of(self, tier: str) -> tuple[str, Mapping[str, Any]]:
        """Name of the policy of the tier with this name, and its parameters and admission."""
        name = self.policy if isinstance(self.policy, str) else self.policy.get(tier, "planned")
        options = dict(self.policy_params.get(tier, {}))
        admission = self.admission if isinstance(self.admission, str) else self.admission.get(tier, "always")
        if admission != "always":
            options["admission"] = admission
        if tier in self.admission_limit:
            options["admission_limit"] = parse_size(self.admission_limit[tier], f"admission_limit.{tier}")
        return name, options

    def _check_policies(self) -> None:
        for what in ("policy", "policy_params", "admission", "admission_limit"):
            told = getattr(self, what)
            by_name = isinstance(told, str) and what in ("policy", "admission")
            if not (by_name or isinstance(told, Mapping)):
                raise ConfigError(f"{what}: neither a name nor a table by tier", got=type(told).__name__)
            unknown = set() if isinstance(told, str) else set(told) - {"device", "host"}
            if unknown:
                raise ConfigError(
                    f"{what}: tiers without a policy", got=sorted(unknown), limit="device, host"
                )

    def _check_disk(self) -> None:
        directories = self.disk_directories
        if self.durability not in DURABILITIES:
            raise ConfigError("durability", got=self.durability, limit=", ".join(DURABILITIES))
        if self.durability != "scratch" and not directories:
            raise ConfigError(
                "durability: has no effect without a directory",
                got=self.durability,
                remedy="give disk=DIRECTORY or leave durability out",
            )
        if not directories:
            if self.disk_capacity is not None:
                raise ConfigError(
                    "disk_capacity: has no effect without a directory",
                    got=self.disk_capacity,
                    remedy="give disk=DIRECTORY or leave disk_capacity out",
                )
            return
        if self.disk_capacity is None:
            raise ConfigError("disk_capacity: missing", remedy='give a budget such as disk_capacity="500GB"')
        if parse_size(self.disk_capacity, "disk_capacity") == 0:
            raise ConfigError("disk_capacity", got=0, limit="> 0", remedy="leave disk out for no disk tier")
        for directory in directories:
            check_directory(directory)

    @property
    def disk_directories(self) -> list[Path]:
        """Directories of the disk tier; empty when it has none or is a Tier already."""
        if isinstance(self.disk, str | os.PathLike):
            return [Path(self.disk)]
        if isinstance(self.disk, Sequence):
            if not self.disk:
                raise ConfigError("disk: an empty list of directories", remedy="leave disk out")
            return [Path(directory) for directory in self.disk]
        return []


def check_directory(directory: Path) -> None:
    """Raises ConfigError unless pages can be written below `directory`, which may not exist yet, or a store that
    can still be read lies there.
    """
    existing = directory
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir():
        raise ConfigError("disk: not a directory", got=str(existing), remedy="give a directory")
    if not os.access(existing, os.W_OK | os.X_OK) and not (directory / "STORE").exists():
        raise ConfigError("disk: not writable", got=str(existing), remedy="give a writable directory")
