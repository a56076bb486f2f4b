"""Every large allocation of the process is counted: what the store makes lies within its budgets at each instant."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from store_allocations import DEVICE_PAGES, PAGE

HERE = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def counter(tmp_path_factory):
    library = tmp_path_factory.mktemp("counter") / "count.so"
    source = HERE / "count_allocations.c"
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    return library


CASES = [("raw", 0), ("exponent", 3), ("int8", 0)]
MORE = [("raw", 3), ("exponent", 0), ("int8", 3)]


@pytest.mark.parametrize(
    ("codec", "host_pages"), [*CASES, *(pytest.param(*case, marks=pytest.mark.long) for case in MORE)]
)
def test_what_is_allocated_is_in_the_budgets_at_each_instant(counter, tmp_path, codec, host_pages):
    """Beside host memory and staging, which are mapped once: the device's budget, and one tensor of the caller's."""
    program = [sys.executable, HERE / "store_allocations.py", codec, str(host_pages), tmp_path]
    environment = {**os.environ, "LD_PRELOAD": str(counter), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout)
    assert told["moved"]["disk->device"] + told["moved"].get("host->device", 0) > 4 * PAGE
    if codec != "raw":
        assert told["staging"] > PAGE, "the codec worked somewhere else"
    assert told["peak"] > DEVICE_PAGES * PAGE * 3 / 4, "the count sees no page"
    assert told["peak"] <= (DEVICE_PAGES + 1) * PAGE + (1 << 20)
