"""The least that a walk's reads can bring up to the device, whatever is evicted when."""

from __future__ import annotations

import numpy as np

from tiercache.plan import AccessPlan


def least_bytes_up(plan: AccessPlan, device_bytes: int) -> int:
    """A lower bound on the bytes that reads of an access plan bring up to a device of `device_bytes`.

    A page that is put is on the device then; from there to its last read it is kept or brought up again. What is
    summed or taken counts for nothing: it may be added to, and copied out, where it lies.
    """
    from tiercache.policies.offline import pfoo_l
    from tiercache.policies.traces.base import make_trace

    pages = [a for a in plan.accesses if a.operation in ("put", "read")]
    is_read = np.array([a.operation == "read" for a in pages], bool)
    if device_bytes <= 0 or not is_read.any():
        return 0
    ids = {key: number for number, key in enumerate(dict.fromkeys(a.key for a in pages))}
    sizes = np.array([a.num_bytes for a in pages], np.int64)
    trace = make_trace([ids[a.key] for a in pages], sizes, source="access plan", resize="each")
    loads = pfoo_l(trace, device_bytes, "bytes").loads
    return max(0, round(loads) - int(sizes[~is_read].sum()))
