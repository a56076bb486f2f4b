"""The core under sanitizers: 10,000 evict-against-read races, and the disk part of this suite."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
SUITE = [
    "contracts/test_tier_contract.py",
    "property/test_disk_machine.py",
    "unit/test_arena.py",
    "unit/test_checksum.py",
    "unit/test_store_command.py",
    "faults/test_disk_io_faults.py",
    "faults/test_disk_damage.py",
    "faults/test_disk_hostile.py",
    "faults/test_disk_power_cut.py",
    "faults/test_disk_processes.py",
    "faults/test_disk_kill.py",
]
pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]


def build(folder: Path, sanitizer: str, target: str) -> Path:
    """Configures and builds one target of the project under a sanitizer."""
    import nanobind

    configure = [
        "cmake",
        "-S",
        str(ROOT),
        "-B",
        str(folder),
        f"-DTIERCACHE_SANITIZE={sanitizer}",
        "-DCMAKE_BUILD_TYPE=RelWithDebInfo",
        f"-DPython_EXECUTABLE={sys.executable}",
        f"-Dnanobind_DIR={nanobind.cmake_dir()}",
    ]
    subprocess.run(configure, check=True, capture_output=True, text=True)
    subprocess.run(
        ["cmake", "--build", str(folder), "-j2", "--target", target], check=True, capture_output=True
    )
    return folder


@pytest.mark.parametrize("engine", ["io_uring", "threads"])
@pytest.mark.parametrize("sanitizer", ["thread", "address"])
def test_ten_thousand_races(tmp_path_factory, sanitizer, engine):
    folder = tmp_path_factory.getbasetemp() / f"stress-{sanitizer}"
    program = build(folder, sanitizer, "disk_stress") / "disk_stress"
    store = tmp_path_factory.mktemp("store")
    done = subprocess.run(
        [str(program), str(store), "10000", engine], capture_output=True, text=True, timeout=1200, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "WARNING: ThreadSanitizer" not in done.stderr
    races, hits = map(int, re.match(r"(\d+) races: (\d+) hits", done.stdout).groups())
    assert races >= 10_000
    assert hits > 1000


# The editable install would come first, in the tests and in the processes that they start.
HOOK = """
import sys
sys.meta_path = [finder for finder in sys.meta_path if "ScikitBuild" not in type(finder).__name__]
"""
CHECK = "import sys, tiercache._core as core; assert core.__file__.startswith(sys.argv[1]), core.__file__"


def test_the_disk_suite_under_the_address_sanitizer(tmp_path):
    folder = build(tmp_path / "build", "address", "_core")
    site = tmp_path / "site"
    shutil.copytree(ROOT / "tiercache", site / "tiercache", ignore=shutil.ignore_patterns("*.so", "csrc"))
    for room in ("policies", "runtime"):
        shutil.copytree(ROOT / room, site / "tiercache" / room)
    for module in folder.glob("_core*.so"):
        shutil.copy(module, site / "tiercache")
    (site / "sitecustomize.py").write_text(HOOK)
    # Python brings no C++ library along, and the sanitizer must find the one whose throw it wraps.
    runtime = [
        subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True)
        for name in ("libasan.so", "libstdc++.so.6")
    ]
    environment = {
        **os.environ,
        "LD_PRELOAD": " ".join(found.stdout.strip() for found in runtime),
        "ASAN_OPTIONS": "detect_leaks=0:halt_on_error=1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(site),
        "PYTHONSAFEPATH": "1",  # or the tree itself, without its modules, would be found before that
    }
    subprocess.run([sys.executable, "-c", CHECK, str(site)], env=environment, check=True)
    files = [str(ROOT / "tests" / name) for name in SUITE]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "--timeout=1500", "-p", "no:cacheprovider", *files],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=2400,
        check=False,
    )
    print(done.stdout[-300:])  # noqa: T201 - the counts, shown with -rP
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    assert "AddressSanitizer" not in done.stderr
