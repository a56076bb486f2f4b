"""One engine, online and offline: the policy object that the store asks and the simulator runs."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np

from tiercache.policies import base
from tiercache.policies.compiler import HOOKS, Hooks, build, explain
from tiercache.policies.errors import PolicyError
from tiercache.policies.spec import ADMISSIONS, admission_limit_of
from tiercache.policies.structures import timeline

EMPTY = np.empty(0, base.REQUEST)


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
        admission: which missed pages may enter; see `policies.spec.Tier`.
        admission_limit: see there.
        params: the policy's parameters.

    Raises:
        PolicyError: a parameter is unknown or out of range, or a hook is wrong.
    """

    def __init__(
        self,
        hooks: Hooks,
        *,
        capacity_bytes: int,
        max_entries: int = 1024,
        admission: str = "always",
        admission_limit: int | None = None,
        **params: Any,
    ) -> None:
        if capacity_bytes <= 0:
            raise PolicyError(f"policy {hooks.name}: capacity_bytes must be positive", got=capacity_bytes)
        limit = admission_limit_of(admission, admission_limit, capacity_bytes, f"policy {hooks.name}")
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
        self.M[base.ADMISSION] = ADMISSIONS[admission]
        self.M[base.ADMISSION_LIMIT] = limit
        # A store must keep its pages: a policy that in a trace refuses what its queues can't hold would switch it off.
        self._judges = hasattr(hooks.module, "admit") and not getattr(hooks.module, "admit_is_fit", False)
        self.selective = admission != "always" or self._judges
        self.oracle = hooks.oracle
        setup = getattr(hooks.module, "setup", None)
        if setup is not None:
            self._call(setup, self.M, self.F, **params)
        elif params:
            raise PolicyError(f"policy {hooks.name} takes no parameters", got=", ".join(sorted(params)))
        self._selected = np.empty(max(max_entries, 1), base.REQUEST)
        self._ring = hasattr(hooks.module, "prepare")

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

    def _widen(self, ahead: int) -> None:
        """Makes the ring of times wide enough for a next use `ahead` of now."""
        self.params = {**self.params, "horizon": 2 * ahead}
        M = np.zeros(base.SCRATCH + self._scratch(len(self.R)), np.int64)
        M[: base.WORDS] = self.M[: base.WORDS]
        self.hooks.module.setup(M, self.F, **self.params)
        self.M = M
        timed = np.flatnonzero(self.R["flag"])
        # of pages that wanted the same time the first one told has the later place, and keeps it
        timed = timed[np.lexsort((-self.R["pos"][timed], self.R["next_use"][timed]))]
        self.R["flag"][timed] = 0
        for page in timed.tolist():
            self._do(base.NEXT_USE, page, int(self.R["next_use"][page]))

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
        if when is not None and self._ring and when - int(self.M[base.NOW]) >= self.M[timeline.SIZE]:
            self._widen(when - int(self.M[base.NOW]))
        self._do(base.NEXT_USE, id, base.NEVER if when is None else when)

    def advance(self, now: int) -> None:
        """The time is `now`, counted in accesses of the plan. A time that has passed voids all known next uses."""
        if now < self.M[base.NOW]:
            for page in self.resident():
                self._do(base.NEXT_USE, page, base.NEVER)
            self.R["next_use"] = base.NEVER
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
        return self._selected["id"][:count].tolist()

    def run(self, requests: Any, events: Any, start: int, stop: int) -> int:
        """Plays requests[start:stop] of a trace and writes their `hit`; returns where it stopped.

        Events for the next tier go to `events` (which also serves as scratch: as long as there are entries); a
        run stops early when it is nearly full.
        """
        try:
            reached: int = self._step(self.R, self.M, self.F, requests, events, base.RUN, start, stop, 0.0)
        except IndexError as error:  # only a user's file is checked for this
            hook = list(HOOKS)[int(self.M[base.HOOK])]
            raise PolicyError(f"policy {self.name}: hook {hook} reads or writes outside R, M or F") from error
        if self.M[base.ERROR]:
            self._fail(int(requests["id"][min(reached, stop - 1)]))
        if self.hooks.checked:
            self.check_integrity()
        return reached

    def admits(self, id: int, num_bytes: int) -> bool:  # noqa: A002
        """Whether page `id`, which is not in the tier and wants to be, may enter; the question is remembered.

        A policy that is not `selective` says yes to all.
        """
        if not self.selective:
            return True
        if num_bytes < 0:
            raise PolicyError(f"policy {self.name}: a page {id} with a negative size", got=num_bytes)
        return bool(self._do(base.ADMITS, id, num_bytes, float(self._judges)))

    def evict(self, id: int, to_tier: int = -1) -> None:  # noqa: A002
        """Page `id` left the tier, downwards to `to_tier` or (-1) for good; a ghost of it may stay."""
        self._do(base.EVICT, id, to_tier)

    def check_integrity(self) -> None:
        """Raises PolicyError when a hook changed what is the engine's."""
        inside = self.R["resident"] > 0
        books = {
            "USED": (int(self.R["size"][inside].sum()), int(self.M[base.USED])),
            "COUNT": (int(inside.sum()), int(self.M[base.COUNT])),
            "LEASED": (int(self.R["size"][inside & (self.R["lease"] > 0)].sum()), int(self.M[base.LEASED])),
        }
        for word, (true, told) in books.items():
            if true != told:
                raise PolicyError(
                    f"policy {self.name}: a hook changed the engine's fields: {word}", got=told, limit=true
                )

    @property
    def used_bytes(self) -> int:
        """Bytes of the resident pages."""
        return int(self.M[base.USED])

    def resident(self) -> list[int]:
        """Ids of the resident pages."""
        return np.flatnonzero(self.R["resident"]).tolist()
