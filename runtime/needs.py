"""What a step needs of a store's budgets, told before anything runs."""

from __future__ import annotations

from typing import Any

from tiercache.errors import TierCacheError, TierFullError
from tiercache.plan import AccessPlan
from tiercache.runtime.probe import Shape


def least_bytes(plan: AccessPlan) -> tuple[int, int]:
    """The least that all tiers together, and the device alone, must hold for a plan to be carried out.

    What counts is what `AccessPlan.live_bytes` says. On the device the two pages that an attention reads at once must
    fit, and every other page.
    """
    most_read = last_read = 0
    for access in plan.accesses:
        is_pair = access.operation == "read" and access.key.kind in ("value", "rotary_key")
        most_read = max(most_read, access.num_bytes + (last_read if is_pair else 0))
        last_read = access.num_bytes if access.operation == "read" else 0
    return max(plan.live_bytes(), default=0), most_read


def least_device_bytes(shape: Shape, node_tokens: int) -> int:
    """The second of `least_bytes` for nodes of this length, from the model's shape alone."""
    pairs = (
        node_tokens * layer.dtype.itemsize * sum(heads * width for heads, width in layer.stored_pages)
        for layer in shape.layers
    )
    pages = (event.bytes_of(node_tokens) for events in shape.events.values() for event in events)
    return max([*pairs, *pages], default=0)


def check_device(on_device: int, device_bytes: int, error: type[TierCacheError]) -> None:
    """Raises `error`, naming the minimum, where a device budget is below what is read at once."""
    if on_device > device_bytes:
        raise error(
            "step: the pages that one layer reads at once exceed the device's budget",
            got=f"{device_bytes} bytes",
            limit=f"at least {on_device}",
            remedy="raise device, or cut nodes shorter (max_node_tokens)",
        )


def check_budgets(plan: AccessPlan, store: Any) -> None:
    """Raises TierFullError, naming the minimum, where a plan cannot be carried out however pages are moved.

    With a codec that makes pages smaller only the device's budget can be judged.
    """
    in_all, on_device = least_bytes(plan)
    capacities = store.stats().bytes_capacity
    total, device = sum(capacities.values()), store.config.device_bytes
    if in_all > total and store.config.codec == "raw":
        raise TierFullError(
            "step: one path's pages, with the gradients and inputs that its nodes wait for, exceed the store",
            got=f"budgets of {total} bytes ({', '.join(capacities)})",
            limit=f"at least {in_all}",
            remedy="raise a budget, add a tier, or leave less for pop (prefix_activations)",
        )
    check_device(on_device, device, TierFullError)
