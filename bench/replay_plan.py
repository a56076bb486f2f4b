"""Which runs the replay benchmark makes, in which order."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from replay_workload import Shape

MAIN = Shape(prompt=4096, tail=64, branches=8)
SHAPES = {
    "main": MAIN,
    "g16": replace(MAIN, branches=16),
    "g2": replace(MAIN, branches=2),
    "p2048": replace(MAIN, prompt=2048),
    "p8000": replace(MAIN, prompt=8000),
    "ragged": replace(MAIN, ragged=True),
    "share_3": Shape(tail=256, branches=8, opening=3),
    "share_0": Shape(tail=256, branches=8, opening=0),
}
# Rounding in bf16 differs from text to text by more than the contenders do, so gradients are compared on several.
TEXTS = {f"text_{n}": Shape(prompt=1024, branches=2, start=12000 * (n + 1)) for n in range(4)}
SHAPES |= TEXTS
DENSE_ROWS = 2


@dataclass(frozen=True)
class Job:
    """One process: a contender on one shape, or on two that take turns.

    Attributes:
        name: of the job in the results.
        contender: key of CONTENDERS.
        shapes: keys of SHAPES.
        extra: further fields of the job as replay_side.py reads them.
        once: not repeated for a median.
    """

    name: str
    contender: str
    shapes: tuple[str, ...]
    extra: dict[str, Any]
    once: bool = False

    def as_dict(self, shapes: dict[str, Shape]) -> dict[str, Any]:
        """What replay_side.py reads."""
        named = [asdict(shapes[name]) for name in self.shapes]
        return {"contender": self.contender, "shapes": named, "dtype": "bfloat16", **self.extra}


def _gradient_job(name: str, contender: str, **extra: Any) -> Job:
    """Leaves `NAME.gradient.N` of every text."""
    return Job(
        f"gradient_{name}", contender, tuple(TEXTS), {"gradient": f"{name}.gradient", **extra}, once=True
    )


def plan(*, quick: bool) -> list[Job]:
    """The jobs in order: contenders take turns, so that a machine that slows down slows all of them."""
    timed = [
        Job("dense", "dense", ("main",), {"rows": DENSE_ROWS}),
        Job("tiercache", "tiercache", ("main",), {}),
        Job("prefix_grouper", "prefix_grouper", ("main",), {"check": True}),
        Job("dense_checkpointed", "dense_checkpointed", ("main",), {"rows": DENSE_ROWS}),
        Job("tiercache_detached", "tiercache_detached", ("main",), {}),
        Job("tiercache_ragged", "tiercache", ("ragged",), {}),
        Job("tiercache_g16", "tiercache", ("g16",), {}),
        Job("tiercache_g2", "tiercache", ("g2",), {}),
    ]
    once = [
        Job("tiercache_p2048", "tiercache", ("p2048",), {}, once=True),
        Job("tiercache_p8000", "tiercache", ("p8000",), {}, once=True),
        Job("opening", "tiercache", ("share_3", "share_0"), {"repeats": 2 if quick else 6}, once=True),
        _gradient_job("reference", "dense", dtype="float32"),
        _gradient_job("dense", "dense"),
        _gradient_job("tiercache", "tiercache"),
    ]
    if quick:
        return timed + once
    return [*timed, *once, *timed, Job("dense_all_rows", "dense", ("main",), {}, once=True), *timed]
