"""What a machine's tiers, codecs and arithmetic can do: measured by `tiercache profile`, read by planner and tuner."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from tiercache.errors import ConfigError

FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSpeed:
    """A tier as the tier above sees it: reads come up, writes go down.

    Attributes:
        read_bytes_per_s, write_bytes_per_s: of large pages.
        read_latency_s, write_latency_s: of the smallest page.
        beside_compute: share of their speed that copies keep while arithmetic runs.
        compute_share: share of its speed that arithmetic keeps while copies run.
    """

    read_bytes_per_s: float
    write_bytes_per_s: float
    read_latency_s: float = 0.0
    write_latency_s: float = 0.0
    beside_compute: float = 1.0
    compute_share: float = 1.0

    def read_s(self, num_bytes: float, num_pages: float = 1) -> float:
        """Seconds to bring pages up, one after another."""
        return num_pages * self.read_latency_s + num_bytes / self.read_bytes_per_s

    def write_s(self, num_bytes: float, num_pages: float = 1) -> float:
        """Seconds to send pages down, one after another."""
        return num_pages * self.write_latency_s + num_bytes / self.write_bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecSpeed:
    """A codec on normally distributed bf16: raw bytes over stored bytes, and raw bytes a second either way.

    `beside_compute` and `compute_share` as in `TierSpeed`.
    """

    ratio: float
    encode_bytes_per_s: float
    decode_bytes_per_s: float
    beside_compute: float = 1.0
    compute_share: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeSpeed:
    """Arithmetic in one dtype: matrix products, attention, and attention's backward.

    Attributes:
        matmul_flops_per_s: of products that are large every way.
        attention_flops_per_s, attention_backward_flops_per_s: of one page's product and its backward.
        matmul_half_dim: smallest dimension at which a product reaches half of its speed.
        attention_half_queries: queries over one page at which attention reaches half of its speed.
    """

    matmul_flops_per_s: float
    attention_flops_per_s: float
    attention_backward_flops_per_s: float
    matmul_half_dim: float = 0.0
    attention_half_queries: float = 0.0

    def matmul_s(self, flops: float, smallest_dim: float) -> float:
        """Seconds of a matrix product."""
        return flops / self.matmul_flops_per_s * (1.0 + self.matmul_half_dim / max(1.0, smallest_dim))

    def attention_s(self, flops: float, queries: float, *, backward: bool = False) -> float:
        """Seconds of attention of so many queries in one call."""
        rate = self.attention_backward_flops_per_s if backward else self.attention_flops_per_s
        return flops / rate * (1.0 + self.attention_half_queries / max(1.0, queries))


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What a profile was measured on.

    Attributes:
        processor: name of the host's.
        cores: that the process may use.
        memory_bytes: of the host.
        accelerator: name, or None where the host computes.
        num_accelerators: of them.
        accelerator_bytes: memory of one.
    """

    processor: str
    cores: int
    memory_bytes: int
    accelerator: str | None = None
    num_accelerators: int = 0
    accelerator_bytes: int = 0

    def differences(self, other: Machine) -> list[str]:
        """Fields in which the two differ so far that a profile of one says little of the other."""
        differing = []
        for what in ("processor", "cores", "accelerator"):
            mine, theirs = getattr(self, what), getattr(other, what)
            if mine != theirs:
                differing.append(f"{what}: {mine} against {theirs}")
        return differing


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A machine's speeds, and the costs that follow from them.

    Attributes:
        machine: that was measured; None for figures of a usual one.
        tiers: "host" and "disk".
        parts: what the tiers are made of, each alone: "device memory", "host memory", "arena", each drive.
        codecs: by name.
        compute: by torch's name of the dtype, as in "bfloat16".
        memory_bytes_per_s: what elementwise work reads and writes, on the device that computes.
        op_s: fixed cost of an operator there.
        fresh_s_per_byte: cost of memory that the process did not have before; 0 where an allocator keeps it.
    """

    machine: Machine | None = None
    tiers: Mapping[str, TierSpeed] = field(default_factory=dict)
    parts: Mapping[str, TierSpeed] = field(default_factory=dict)
    codecs: Mapping[str, CodecSpeed] = field(default_factory=dict)
    compute: Mapping[str, ComputeSpeed] = field(default_factory=dict)
    memory_bytes_per_s: float
    op_s: float
    fresh_s_per_byte: float = 0.0

    def tier(self, name: str) -> TierSpeed:
        """Speeds of a tier. Raises ConfigError for one that was not measured."""
        if name not in self.tiers:
            raise ConfigError(
                f"profile: no figures of tier {name!r}",
                limit=", ".join(self.tiers),
                remedy="measure it with tiercache profile",
            )
        return self.tiers[name]

    def computing(self, dtype: object) -> ComputeSpeed:
        """Speeds of a torch dtype, or of its name; fp32's where that dtype was not measured."""
        name = dtype_name(dtype)
        found = self.compute.get(name) or self.compute.get("float32")
        if found is None:
            raise ConfigError("profile: no figures of arithmetic", got=name, limit=", ".join(self.compute))
        return found

    def as_dict(self) -> dict[str, Any]:
        """The document that `save` writes."""
        return {"format": FORMAT, **asdict(self)}

    def save(self, path: str | Path) -> None:
        """Writes the profile file. Raises ConfigError when it cannot be written."""
        try:
            Path(path).write_text(json.dumps(self.as_dict(), indent=1) + "\n")
        except OSError as error:
            raise ConfigError(f"profile {path}: cannot be written", got=error) from error

    def warn_unless_of(self, machine: Machine) -> None:
        """Warns when the profile was measured on a machine that differs from this one."""
        differing = self.machine.differences(machine) if self.machine is not None else []
        if differing:
            warnings.warn(
                f"the profile is of another machine ({'; '.join(differing)}); measure this one with "
                "tiercache profile",
                stacklevel=2,
            )


def dtype_name(dtype: object) -> str:
    """A torch dtype's name without "torch."; a name stays what it is."""
    return str(dtype).removeprefix("torch.")


_Record = TypeVar("_Record", TierSpeed, CodecSpeed, ComputeSpeed)


def load_profile(path: str | Path) -> Profile:
    """A profile file. It says nothing of whether it is of this machine: see `Profile.warn_unless_of`.

    Raises:
        ConfigError: the file is no profile, or a figure cannot be meant.
    """
    try:
        told = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"profile {path}: cannot be read", got=error) from error
    if not isinstance(told, dict) or told.get("format") != FORMAT:
        got = told.get("format") if isinstance(told, dict) else type(told).__name__
        raise ConfigError(f"profile {path}: no profile of this format", got=got, limit=f"format {FORMAT}")
    try:
        machine = None if told.get("machine") is None else Machine(**told["machine"])
        return Profile(
            machine=machine,
            tiers=_records(TierSpeed, told["tiers"]),
            parts=_records(TierSpeed, told["parts"]),
            codecs=_records(CodecSpeed, told["codecs"]),
            compute=_records(ComputeSpeed, told["compute"]),
            memory_bytes_per_s=_positive("memory_bytes_per_s", told["memory_bytes_per_s"]),
            op_s=_positive("op_s", told["op_s"]),
            fresh_s_per_byte=_positive("fresh_s_per_byte", told.get("fresh_s_per_byte", 0.0)),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"profile {path}: fields are missing or unknown", got=error) from error


def _records(kind: type[_Record], table: Mapping[str, Mapping[str, float]]) -> dict[str, _Record]:
    return {
        name: kind(**{what: _positive(f"{name}: {what}", value) for what, value in record.items()})
        for name, record in table.items()
    }


def _positive(what: str, value: object) -> float:
    zero = what.endswith(("latency_s", "half_dim", "half_queries", "fresh_s_per_byte"))
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not (value > 0 or (zero and value == 0)):  # type: ignore[operator]
        raise ConfigError(f"profile: {what}", got=value, limit=">= 0" if zero else "> 0")
    return float(value)  # type: ignore[arg-type]
