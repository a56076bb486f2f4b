"""How long a node and how wide a visit of tails may be, from the device budget."""

from __future__ import annotations

from dataclasses import dataclass

from tiercache.runtime.options import ReplayOptions
from tiercache.runtime.probe import Shape

# Beyond these lengths matrix products get no faster, and a layer's activations only grow.
LONGEST_ON_HOST = 2048
LONGEST_ON_ACCELERATOR = 16384
SHORTEST_TOKENS = 64
_PAGES_IN_FLIGHT = 8  # of one node and layer: in use, on their way up, on their way down
_ACTIVATIONS_PER_BUDGET = 1.5  # a visit's activations against the budget for pages
_LONGEST_TAIL = (
    2  # visits: a somewhat longer tail runs alone, for a cut token costs four passes and two more visits
)


@dataclass(frozen=True, slots=True)
class Limits:
    """How the tree is cut.

    Attributes:
        max_node_tokens: longest node.
        max_visit_tokens: most tail tokens replayed together.
        max_tail_tokens: longest tail; what is longer gives its beginning to a chain of nodes.
    """

    max_node_tokens: int
    max_visit_tokens: int
    max_tail_tokens: int


def choose_limits(options: ReplayOptions, shape: Shape, device_bytes: int, *, on_host: bool) -> Limits:
    """What the options say, and where they say nothing, what the store's device budget suggests.

    A node is as long as lets several of its pages of one layer, gradient pages included, lie in the budget, and
    one layer's activations near it. Tails
    are as many as keep all their layers' activations, measured by the probe, near the budget.
    """
    page = 2 * shape.page_bytes_per_token + 2 * shape.gradient_bytes_per_token
    longest = LONGEST_ON_HOST if on_host else LONGEST_ON_ACCELERATOR
    room = visit_room(options, device_bytes)
    by_pages = device_bytes // max(1, _PAGES_IN_FLIGHT * page)
    by_activations = room * max(1, len(shape.layers)) // shape.activation_bytes_per_token
    node = options.max_node_tokens or _clamp(min(by_pages, by_activations), longest)
    if options.max_visit_tokens is not None:
        return Limits(node, options.max_visit_tokens, options.max_visit_tokens)
    visit = _clamp(room // shape.activation_bytes_per_token, longest)
    return Limits(node, visit, _LONGEST_TAIL * visit)


def visit_room(options: ReplayOptions, device_bytes: int) -> int:
    """Bytes that the activations of one visit may take."""
    return int(options.max_visit_bytes or _ACTIVATIONS_PER_BUDGET * device_bytes)


def _clamp(tokens: int, longest: int) -> int:
    return max(SHORTEST_TOKENS, min(longest, tokens))
