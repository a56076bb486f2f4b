"""Reference vectors that public libraries and papers state; bytes are libCacheSim's own too."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from tiercache.policies.traces import Trace, with_next_uses
from tiercache.policies.traces.text import read_mooncake

MIB = 1 << 20
CAPACITIES = [mib * MIB for mib in range(128, 1025, 128)]

CLOUD_PHYSICS = {
    "fifo": (
        [93403, 89386, 84387, 84025, 72498, 72228, 72182, 72140],
        [4213112832, 4052646400, 3829170176, 3807412736, 3093146112, 3079525888, 3079210496, 3077547520],
    ),
    "lru": (
        [93374, 89783, 83572, 81722, 72494, 72104, 71972, 71704],
        [4214303232, 4061242368, 3778040320, 3660569600, 3100927488, 3078128640, 3075403776, 3061662720],
    ),
    "clock": (
        [93313, 89775, 83411, 81328, 74815, 72283, 71927, 64456],
        [4213887488, 4064512000, 3762650624, 3644467200, 3256760832, 3091688448, 3074241024, 2697378816],
    ),
    "sieve": (
        [91699, 86720, 78578, 76707, 69945, 66221, 64445, 64376],
        [4158632960, 3917211648, 3536227840, 3455379968, 3035580416, 2801699328, 2699456000, 2696345600],
    ),
    "arc": (
        [90252, 85861, 78168, 74297, 67381, 65685, 64439, 64772],
        [4068098560, 3821026816, 3525644800, 3296890368, 2868538880, 2771180032, 2699484672, 2712971264],
    ),
    "s3fifo_2023": (
        [89307, 82387, 77041, 76791, 71300, 70343, 70455, 70355],
        [4040718336, 3703628800, 3353047552, 3282235904, 3038256128, 2980646912, 2984458752, 2979649536],
    ),
    "s3fifo": (
        [90117, 80915, 75060, 72191, 69815, 65542, 60799, 56045],
        [4058576896, 3573827584, 3244417024, 3061737984, 2898109952, 2628363776, 2425027072, 2327934464],
    ),
    "lirs": (
        [89819, 79237, 73143, 70363, 68405, 64494, 58640, 53924],
        [4060558336, 3525952512, 3199406080, 3011810816, 2848310272, 2580918784, 2361375744, 2288325120],
    ),
    "gdsf": (
        [89070, 84750, 74850, 70490, 67923, 64180, 61027, 58721],
        [4210726912, 4057058816, 3719176192, 3436855296, 3271648256, 3029728768, 2828456448, 2677800448],
    ),
    "belady": (
        [79256, 70724, 65481, 61594, 59645, 57599, 50873, 48974],
        [3472532480, 2995165696, 2726689792, 2537648128, 2403427840, 2269212672, 2134992896, 2029769728],
    ),
    "lfu": (
        [91699, 86720, 78578, 76707, 69945, 66221, 64445, 64376],
        [4158632960, 3917211648, 3536227840, 3455379968, 3035580416, 2801699328, 2699456000, 2696345600],
    ),
    # no vector of a test, but what the library libcachesim 0.3.5 counts
    "2q": ([91729, 83567, 82245, 77039, 72182, 72136, 72113, 72074], None),
}

OLTP_CAPACITIES = [1000, 2000, 5000, 10000, 15000]
OLTP = {  # hit ratios in percent, as the ARC paper prints them
    "lru": [32.83, 42.47, 53.65, 60.70, 64.63],
    "arc": [38.95, 46.08, 55.25, 61.87, 65.40],
    "belady": [53.61, 60.40, 68.27, 73.02, 75.14],
}

MOONCAKE_BLOCKS = [1024, 4096, 16384]
MOONCAKE = {  # hit tokens in the last half of the prompts
    "lru": [3194814, 5935037, 18940960],
    "belady_bypass": [13516455, 23452732, 27038068],
}


def mooncake_blocks(folder: Path, policy: str) -> tuple[Trace, Any, Any]:
    """The Mooncake conversation with blocks of one byte; the tokens of each, and which are in the last half of prompts.

    LRU's vector is that of a server that holds a prompt's blocks while it is served.
    """
    trace = read_mooncake(folder / "mooncake_conversation.jsonl", pinned=policy == "lru")
    tokens = trace.requests["size"].copy()
    blocks = trace.requests.copy()
    blocks["size"] = 1
    prompt = np.cumsum(trace.requests["tag"]) - 1
    return with_next_uses(dataclasses.replace(trace, requests=blocks)), tokens, prompt >= 12031 // 2


def java_random(seed: int, bound: int, count: int) -> list[int]:
    """`count` draws of java.util.Random(seed).nextInt(bound), for a bound that is no power of two."""
    state = (seed ^ 0x5DEECE66D) & ((1 << 48) - 1)
    drawn: list[int] = []
    while len(drawn) < count:
        state = (state * 0x5DEECE66D + 0xB) & ((1 << 48) - 1)
        bits = state >> 17
        value = bits % bound
        if bits - value + (bound - 1) < 1 << 31:  # otherwise Java draws again
            drawn.append(value)
    return drawn
