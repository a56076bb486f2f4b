"""One engine, online and offline: a policy's hooks compiled into one function, and the store's policy object.

Implementation notes. numba compiles `kernel.step` once a policy; every operation of the store and every run
of the simulator goes through that one machine function, so both are the same code. The copy's qualified
name carries a digest of all sources that went in, because numba's compile cache looks at the outermost
function's file alone. Rejected: closures over dispatchers (numba's cache never hits), a jitclass or tuples
of arrays (several us a call).
"""

from __future__ import annotations

import hashlib
import inspect
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import numba
import numpy as np
from numba import types

from tiercache.errors import PolicyError
from tiercache.policies import base, defaults, kernel

HOOKS: dict[str, tuple[str, ...]] = {
    "on_insert": ("R", "M", "F", "k", "now"),
    "on_hit": ("R", "M", "F", "k", "now"),
    "on_evict": ("R", "M", "F", "k", "now", "to_tier"),
    "victim": ("R", "M", "F", "now"),
    "on_miss": ("R", "M", "F", "k", "now"),
    "admit": ("R", "M", "F", "k", "now"),
    "on_remove": ("R", "M", "F", "k", "now"),
    "on_next_use": ("R", "M", "F", "k", "when", "now"),
    "on_advance": ("R", "M", "F", "now"),
    "on_resize": ("R", "M", "F", "k", "delta"),
}
REQUIRED = ("on_insert", "on_hit", "on_evict", "victim")
PARTS = ("leave", "enter", "forget", "free", "resize", "lookup", "manage")
_ENTRIES = numba.from_dtype(base.ENTRY)[::1]
_REQUESTS = numba.from_dtype(base.REQUEST)[::1]
_META = (_ENTRIES, types.int64[::1], types.float64[::1])
STEP = types.int64(*_META, _REQUESTS, _REQUESTS, types.int64, types.int64, types.int64, types.float64)
EMPTY = np.empty(0, base.REQUEST)


@dataclass(frozen=True, slots=True)
class Hooks:
    """A policy's file, checked: what the engine compiles and how its state is set up.

    Attributes:
        name: of the policy.
        module: the file; its `setup(M, F, **params)` fills the policy's words, its
            `scratch(max_entries, **params) -> int` asks for words of M from SCRATCH on, its
            `oracle` says that it needs next uses.
        checked: compile with bounds checks (a user's file).
    """

    name: str
    module: ModuleType
    checked: bool = False

    @property
    def oracle(self) -> bool:
        """Whether the policy needs to know next uses."""
        return bool(getattr(self.module, "oracle", False))

    def validate(self) -> None:
        """Raises PolicyError, naming the hook, when one is missing or takes other parameters."""
        for name, parameters in HOOKS.items():
            hook = getattr(self.module, name, None)
            if hook is None:
                if name in REQUIRED:
                    raise PolicyError(f"policy {self.name}: hook {name} is missing", limit=_signature(name))
                continue
            if not isinstance(hook, FunctionType):
                raise PolicyError(
                    f"policy {self.name}: hook {name} is no plain function", got=type(hook).__name__
                )
            if len(inspect.signature(hook).parameters) != len(parameters):
                raise PolicyError(
                    f"policy {self.name}: hook {name} has the wrong parameters",
                    got=f"{name}{inspect.signature(hook)}",
                    limit=_signature(name),
                )


def _signature(name: str) -> str:
    return f"{name}({', '.join(HOOKS[name])})"


@lru_cache(maxsize=64)
def _digest(path: str) -> str:
    folder = Path(__file__).parent
    sources = [
        folder / "base.py",
        folder / "kernel.py",
        *sorted((folder / "structures").glob("*.py")),
        Path(path),
    ]
    return hashlib.blake2b(b"\0".join(source.read_bytes() for source in sources), digest_size=8).hexdigest()


@lru_cache(maxsize=64)
def build(hooks: Hooks) -> Any:
    """The policy's `step`, compiled or read from numba's cache. Raises PolicyError, naming a bad hook."""
    hooks.validate()
    options = {
        "no_cpython_wrapper": True,
        "no_cfunc_wrapper": True,
        "nogil": True,
        "error_model": "numpy",
        "boundscheck": hooks.checked,
    }
    namespace = {**vars(defaults), **vars(kernel)}
    for name in HOOKS:
        default = getattr(defaults, name)
        hook = getattr(hooks.module, name, FunctionType(default.__code__, namespace, name))
        namespace[name] = numba.njit(hook, **options)
        if hooks.checked:
            namespace[name] = numba.njit(_named(namespace[name], list(HOOKS).index(name)), **options)
    for name in PARTS:
        part = FunctionType(getattr(kernel, name).__code__, namespace, name)
        namespace[name] = numba.njit(part, **options)
    step = FunctionType(kernel.step.__code__, namespace, "step")
    step.__module__ = kernel.__name__
    step.__qualname__ = (
        f"step_{hooks.name}_{_digest(str(hooks.module.__file__))}" + "_checked" * hooks.checked
    )
    try:
        return numba.njit(STEP, cache=True, **{**options, "no_cpython_wrapper": False})(step)
    except numba.core.errors.NumbaError as error:
        raise _blame(hooks, namespace, error) from error


def _named(hook: Any, number: int) -> Any:
    """The hook, but M knows that it is running: its name can be told when it reads out of bounds."""
    word = base.HOOK

    def named(R: Any, M: Any, F: Any, *rest: Any) -> Any:
        M[word] = number
        return hook(R, M, F, *rest)

    return named


def _blame(hooks: Hooks, namespace: dict[str, Any], error: Exception) -> PolicyError:
    for name, parameters in HOOKS.items():
        kinds = (*_META, *[types.int64] * (len(parameters) - 3))
        try:
            namespace[name].compile(kinds)
        except numba.core.errors.NumbaError as reason:
            return PolicyError(f"policy {hooks.name}: hook {name} does not compile: {reason}")
    return PolicyError(f"policy {hooks.name} does not compile: {error}")


def aligned(count: int, dtype: np.dtype[Any]) -> Any:
    """Zeroed records that start at a cache line."""
    raw = np.zeros(count * dtype.itemsize + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + count * dtype.itemsize].view(dtype)


class OnlinePolicy:
    """Chooses victims among the pages of one tier. Not thread-safe: its owner calls it under its own lock.

    Args:
        hooks: the policy's file.
        capacity_bytes: budget of the tier; policies size their queues by it.
        max_entries: ids below it need no growth. Ids are dense, the caller's.
        params: the policy's parameters.

    Raises:
        PolicyError: a parameter is unknown or out of range, or a hook is wrong.
    """

    def __init__(self, hooks: Hooks, *, capacity_bytes: int, max_entries: int = 1024, **params: Any) -> None:
        if capacity_bytes <= 0:
            raise PolicyError(f"policy {hooks.name}: capacity_bytes must be positive", got=capacity_bytes)
        self.name = hooks.name
        self.hooks = hooks
        self.params = params
        self._step = build(hooks)
        self.R = aligned(max(max_entries, 1), base.ENTRY)
        self.R["next_use"] = base.NEVER
        self.R["tier"] = -1
        self.F = np.zeros(base.NUM_FLOATS)
        self.M = np.zeros(base.SCRATCH + self._scratch(len(self.R)), np.int64)
        self.M[base.CAPACITY] = capacity_bytes
        self.M[base.INCOMING] = -1
        setup = getattr(hooks.module, "setup", None)
        if setup is not None:
            self._call(setup, self.M, self.F, **params)
        elif params:
            raise PolicyError(f"policy {hooks.name} takes no parameters", got=", ".join(sorted(params)))
        self._selected = np.empty(max(max_entries, 1), base.REQUEST)

    def _call(self, function: Any, *args: Any, **params: Any) -> Any:
        try:
            inspect.signature(function).bind(*args, **params)
        except TypeError as error:
            raise PolicyError(f"policy {self.name}: {error}") from error
        return function(*args, **params)

    def _scratch(self, max_entries: int) -> int:
        scratch = getattr(self.hooks.module, "scratch", None)
        return int(self._call(scratch, max_entries, **self.params)) if scratch is not None else 0

    def _grow(self, id: int) -> None:  # noqa: A002 - the contract's name
        if id < 0 or id >= 1 << 31:
            raise PolicyError(f"policy {self.name}: ids are dense and below 2**31", got=id)
        old = len(self.R)
        count = max(2 * old, id + 1)
        R = aligned(count, base.ENTRY)
        R[:old] = self.R
        R["next_use"][old:] = base.NEVER
        R["tier"][old:] = -1
        M = np.zeros(base.SCRATCH + self._scratch(count), np.int64)
        M[: len(self.M)] = self.M
        self.R, self.M = R, M
        self._selected = np.empty(count, base.REQUEST)

    def _do(self, op: int, id: int, x: int = 0, y: float = 0.0) -> int:  # noqa: A002
        if not 0 <= id < len(self.R):
            self._grow(id)
        result: int = self._step(self.R, self.M, self.F, EMPTY, self._selected, op, id, x, y)
        if self.M[base.ERROR]:
            self._fail(id)
        return result

    def _fail(self, id: int) -> None:  # noqa: A002
        code, culprit = int(self.M[base.ERROR]), int(self.M[base.ERROR_ID])
        self.M[base.ERROR] = 0
        raise PolicyError(f"policy {self.name}: {explain(code, culprit, id)}")

    def insert(self, id: int, num_bytes: int, cost: float = 1.0) -> None:  # noqa: A002
        """Page `id` entered the tier. `cost` is the seconds that loading it again would take."""
        if num_bytes < 0:
            raise PolicyError(f"policy {self.name}: insert of {id} with a negative size", got=num_bytes)
        self._do(base.INSERT, id, num_bytes, cost)

    def hit(self, id: int) -> None:  # noqa: A002
        """Page `id`, in the tier, was used."""
        self._do(base.HIT, id)

    def remove(self, id: int) -> None:  # noqa: A002
        """Page `id` is gone for good: nothing of it is remembered."""
        self._do(base.REMOVE, id)

    def lease(self, id: int) -> None:  # noqa: A002
        """Page `id` must not be chosen until as many releases."""
        self._do(base.LEASE, id)

    def release(self, id: int) -> None:  # noqa: A002
        """Ends one lease of page `id`."""
        self._do(base.RELEASE, id)

    def set_next_use(self, id: int, when: int | None) -> None:  # noqa: A002
        """Page `id` will be used next at time `when` of `advance`; None: never again."""
        self._do(base.NEXT_USE, id, base.NEVER if when is None else when)

    def advance(self, now: int) -> None:
        """The time is `now`, counted in accesses of the plan."""
        self._do(base.ADVANCE, 0, now)

    def victims(self, need_bytes: int, incoming: int = -1) -> list[int]:
        """Pages of at least `need_bytes` together, selected and not yet evicted; empty when leases forbid it.

        `incoming` is the page that the room is for; ghosts are then asked before the choice.
        """
        if incoming >= len(self.R):
            self._grow(incoming)
        count = self._step(
            self.R, self.M, self.F, EMPTY, self._selected, base.VICTIMS, incoming, int(need_bytes), 0.0
        )
        if self.M[base.ERROR]:
            self._fail(incoming)
        return self._selected["id"][:count].tolist()  # type: ignore[no-any-return]

    def run(self, requests: Any, events: Any, start: int, stop: int) -> int:
        """Plays requests[start:stop] of a trace and writes their `hit`; returns where it stopped.

        Events for the next tier go to `events` (which also serves as scratch: as long as there are entries); a
        run stops early when it is nearly full.
        """
        reached: int = self._step(self.R, self.M, self.F, requests, events, base.RUN, start, stop, 0.0)
        if self.M[base.ERROR]:
            self._fail(int(requests["id"][min(reached, stop - 1)]))
        return reached

    def evict(self, id: int, to_tier: int = -1) -> None:  # noqa: A002
        """Page `id` left the tier, downwards to `to_tier` or (-1) for good; a ghost of it may stay."""
        self._do(base.EVICT, id, to_tier)

    @property
    def used_bytes(self) -> int:
        """Bytes of the resident pages."""
        return int(self.M[base.USED])

    def resident(self) -> list[int]:
        """Ids of the resident pages."""
        return np.flatnonzero(self.R["resident"]).tolist()  # type: ignore[no-any-return]


def explain(code: int, culprit: int, id: int) -> str:  # noqa: A002
    """The sentence for an error word of the engine."""
    return {
        kernel.BAD_VICTIM: f"hook victim returned {culprit}, which is leased, not resident or no id",
        kernel.NO_VICTIM: "hook victim returned -1 though pages can be evicted",
        kernel.NOT_RESIDENT: f"page {id} is not in the tier, or is leased",
        kernel.BAD_RELEASE: f"page {id} was released more often than leased",
    }[code]
