"""A policy's hooks compiled with the kernel into one function, for the store and the simulator alike.

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
from numba import types

from tiercache.policies import base, defaults, kernel
from tiercache.policies.errors import PolicyError

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
    "on_chosen": ("R", "M", "F", "now"),
}
REQUIRED = ("on_insert", "on_hit", "on_evict", "victim")
PARTS = ("leave", "enter", "forget", "free", "resize", "lookup", "manage")
_ENTRIES = numba.from_dtype(base.ENTRY)[::1]
_REQUESTS = numba.from_dtype(base.REQUEST)[::1]
_META = (_ENTRIES, types.int64[::1], types.float64[::1])
STEP = types.int64(*_META, _REQUESTS, _REQUESTS, types.int64, types.int64, types.int64, types.float64)


@dataclass(frozen=True, slots=True)
class Hooks:
    """A policy's file, checked: what the engine compiles and how its state is set up.

    Attributes:
        name: of the policy.
        module: the file; its `setup(M, F, **params)` fills the policy's words, its
            `scratch(max_entries, **params) -> int` asks for words of M from SCRATCH on, its
            `oracle` says that it needs next uses, its `admit_is_fit` that `admit` only judges what its queues can
            hold, which a store does not ask.
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
        *(folder / f"{name}.py" for name in ("base", "books", "compiler", "defaults", "kernel", "prefetch")),
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
    tag = f"{hooks.name}_{_digest(str(hooks.module.__file__))}" + f"_{hooks.module.__name__}" * hooks.checked

    def copied(function: Any) -> Any:
        # Cached machine code of two policies is linked by name, and the first definition wins: without a name of
        # its own one policy would run another's parts, and write where only the other has memory.
        copy = FunctionType(function.__code__, namespace, function.__name__)
        copy.__module__, copy.__qualname__ = kernel.__name__, f"{function.__name__}_{tag}"
        return copy

    for name in HOOKS:
        hook = getattr(hooks.module, name, None) or copied(getattr(defaults, name))
        namespace[name] = numba.njit(hook, **options)
        if hooks.checked:
            named = _named(namespace[name], list(HOOKS).index(name))
            named.__qualname__ = f"{name}_named_{tag}"
            namespace[name] = numba.njit(named, **options)
    for name in PARTS:
        namespace[name] = numba.njit(copied(getattr(kernel, name)), **options)
    step = copied(kernel.step)
    try:
        return numba.njit(STEP, cache=True, **{**options, "no_cpython_wrapper": False})(step)
    except numba.core.errors.NumbaError as error:
        raise _blame(hooks, error) from error


def _named(hook: Any, number: int) -> Any:
    """The hook, but M knows that it is running: its name can be told when it reads out of bounds."""
    word = base.HOOK

    def named(R: Any, M: Any, F: Any, *rest: Any) -> Any:
        M[word] = number
        return hook(R, M, F, *rest)

    return named


def _blame(hooks: Hooks, error: Exception) -> PolicyError:
    for name, parameters in HOOKS.items():
        hook = getattr(hooks.module, name, None)
        if hook is None:
            continue
        kinds = (*_META, *[types.int64] * (len(parameters) - 3))
        try:
            numba.njit(hook).compile(kinds)
        except numba.core.errors.NumbaError as reason:
            return PolicyError(f"policy {hooks.name}: hook {name} does not compile: {reason}")
    return PolicyError(f"policy {hooks.name} does not compile: {error}")


def explain(code: int, culprit: int, id: int) -> str:  # noqa: A002
    """The sentence for an error word of the engine."""
    return {
        kernel.BAD_VICTIM: f"hook victim returned {culprit}, which is leased, not resident or no id",
        kernel.NO_VICTIM: "hook victim returned -1 though pages can be evicted",
        kernel.NOT_RESIDENT: f"page {id} is not in the tier, or is leased",
        kernel.BAD_RELEASE: f"page {id} was released more often than leased",
    }[code]
