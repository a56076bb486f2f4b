"""What the store tells and asks its policies, noted for the trace: enough to replay every choice of victims."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tiercache.entry import PageKey
from tiercache.trace import AccessTrace


class PolicyNote:
    """A tier's policy that writes down each call before it makes it. Called under the store's lock, as the policy is.

    Rows of the trace, with `policy` the tier's name and `id` the policy's number of the page: "insert" (`bytes`,
    `cost`), "hit", "remove", "lease", "release", "evict" (`bytes`: the tier that it went to, -1 none), "next_use"
    (`bytes`: when, -1 never), "advance" (`bytes`: now), "admits" (`bytes`: the page's; `cost`: 1 for yes, 0 for no),
    "victims" (`bytes`: as many are needed) and, after it, a row "victim" for each page that it named.

    Args:
        policy: what is asked.
        trace: takes the rows.
        tier: name of the policy's tier.
        key_of: the page of an id.
        now_s: the time, in seconds since the store was opened.
    """

    def __init__(
        self,
        policy: Any,
        trace: AccessTrace,
        tier: str,
        key_of: Callable[[int], PageKey | None],
        now_s: Callable[[], float],
    ) -> None:
        self._policy = policy
        self._trace = trace
        self._tier = tier
        self._key_of = key_of
        self._now_s = now_s

    @property
    def selective(self) -> bool:
        """Whether the policy may refuse pages."""
        return bool(self._policy.selective)

    @property
    def oracle(self) -> bool:
        """Whether it chooses by next uses alone."""
        return bool(self._policy.oracle)

    def _note(self, op: str, page: int, number: int = 0, cost: float = 0.0) -> None:
        key = self._key_of(page) if page >= 0 else None
        self._trace.add_question(self._now_s(), key, op, number, self._tier, page, cost)

    def insert(self, page: int, num_bytes: int, cost: float = 1.0) -> None:
        """Notes and makes the call, as do all below."""
        self._note("insert", page, num_bytes, cost)
        self._policy.insert(page, num_bytes, cost)

    def hit(self, page: int) -> None:
        """A use."""
        self._note("hit", page)
        self._policy.hit(page)

    def remove(self, page: int) -> None:
        """The page is gone."""
        self._note("remove", page)
        self._policy.remove(page)

    def lease(self, page: int) -> None:
        """Not to be chosen."""
        self._note("lease", page)
        self._policy.lease(page)

    def release(self, page: int) -> None:
        """The end of a lease."""
        self._note("release", page)
        self._policy.release(page)

    def evict(self, page: int, to_tier: int = -1) -> None:
        """The page left the tier."""
        self._note("evict", page, to_tier)
        self._policy.evict(page, to_tier)

    def set_next_use(self, page: int, when: int | None) -> None:
        """The next use."""
        self._note("next_use", page, -1 if when is None else when)
        self._policy.set_next_use(page, when)

    def advance(self, now: int) -> None:
        """The plan's time."""
        self._note("advance", -1, now)
        self._policy.advance(now)

    def admits(self, page: int, num_bytes: int) -> bool:
        """Whether the page may enter; noted with its answer, unless it always may."""
        if not self.selective:
            return True
        answer: bool = self._policy.admits(page, num_bytes)
        self._note("admits", page, num_bytes, float(answer))
        return answer

    def victims(self, need_bytes: int) -> list[int]:
        """Who should go; noted with its answer."""
        self._note("victims", -1, need_bytes)
        answer: list[int] = self._policy.victims(need_bytes)
        for page in answer:
            self._note("victim", page)
        return answer


def about(tier: str, capacity_bytes: int, policy: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """What makes the same policy again: the tier's entry in the metadata of a trace."""
    return {"tier": tier, "capacity_bytes": capacity_bytes, "policy": policy, "options": dict(options)}
