"""How long a node and how wide a visit of tails may be, from the device budget."""

from __future__ import annotations

from dataclasses import dataclass

from tiercache.runtime.options import ReplayOptions
from tiercache.runtime.probe import Shape

LONGEST_NODE_TOKENS = 2048  # beyond this, matrix products get no faster and a layer's activations only grow
SHORTEST_TOKENS = 64
_PAGES_IN_FLIGHT = 8  # of one node and layer: in use, on their way up, on their way down
_ACTIVATIONS_PER_BUDGET = 4  # a visit's activations against the budget for pages


@dataclass(frozen=True, slots=True)
class Limits:
    """Attributes: max_node_tokens, the longest node; max_visit_tokens, most tail tokens replayed together."""

    max_node_tokens: int
    max_visit_tokens: int


def choose_limits(options: ReplayOptions, shape: Shape, device_bytes: int) -> Limits:
    """What the options say, and where they say nothing, what the store's device budget suggests.

    A node is as long as lets several of its pages of one layer, gradient pages included, lie in the budget. Tails
    are as many as keep all their layers' activations, measured by the probe, within a few times the budget.
    """
    page = 2 * shape.page_bytes_per_token + 2 * shape.gradient_bytes_per_token
    node = options.max_node_tokens or _clamp(device_bytes // max(1, _PAGES_IN_FLIGHT * page))
    room = options.max_visit_bytes or _ACTIVATIONS_PER_BUDGET * device_bytes
    visit = options.max_visit_tokens or _clamp(room // shape.activation_bytes_per_token)
    return Limits(node, visit)


def _clamp(tokens: int) -> int:
    return max(SHORTEST_TOKENS, min(LONGEST_NODE_TOKENS, tokens))
