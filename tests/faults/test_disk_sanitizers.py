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
    "test_disk_io_faults.py",
    "test_disk_damage.py",
    "test_disk_hostile.py",
    "test_disk_power_cut.py",
]
pytestmark = [pytest.mark.long, pytest.mark.timeout(3000)]


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


SCRIPT = """
import sys
site = sys.argv.pop(1)
sys.meta_path = [finder for finder in sys.meta_path if "ScikitBuild" not in type(finder).__name__]
sys.path.insert(0, site)
import tiercache._core
assert tiercache._core.__file__.startswith(site), tiercache._core.__file__
import pytest
sys.exit(pytest.main(sys.argv[1:]))
"""


def test_the_disk_suite_under_the_address_sanitizer(tmp_path):
    folder = build(tmp_path / "build", "address", "_core")
    package = tmp_path / "site" / "tiercache"
    shutil.copytree(ROOT / "tiercache", package, ignore=shutil.ignore_patterns("*.so", "csrc"))
    for room in ("policies", "runtime"):
        shutil.copytree(ROOT / room, package / room)
    for module in folder.glob("_core*.so"):
        shutil.copy(module, package)
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
    }
    files = [str(ROOT / "tests" / "faults" / name) for name in SUITE]
    files.append(str(ROOT / "tests" / "unit" / "test_arena.py"))
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(package.parent), "-q", "-x", "-p", "no:cacheprovider", *files],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=2400,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    assert "AddressSanitizer" not in done.stderr
