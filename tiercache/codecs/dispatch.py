"""Which native path a codec runs: AVX-512 with VBMI, AVX2 with BMI2, or plain. All give the same bits."""

from __future__ import annotations

from tiercache import _core
from tiercache.errors import ConfigError

INSTRUCTIONS = {"portable": 0, "avx2": 1, "avx512": 2}


def resolve_instructions(name: str) -> int:
    """The native number of a path; "auto" is the fastest one that this processor has.

    Raises:
        ConfigError: the name is unknown, or the processor has not those instructions.
    """
    if name == "auto":
        return int(_core.isa_best())
    if name not in INSTRUCTIONS:
        raise ConfigError("instructions", got=repr(name), limit=f"auto, {', '.join(INSTRUCTIONS)}")
    if not _core.isa_available(INSTRUCTIONS[name]):
        raise ConfigError(f"this processor cannot run {name}", remedy='use instructions="auto"')
    return INSTRUCTIONS[name]


def check_threads(threads: int) -> int:
    """`threads` itself. Raises ConfigError unless it is at least 1."""
    if threads < 1:
        raise ConfigError("codec threads", got=threads, limit=">= 1")
    return threads
