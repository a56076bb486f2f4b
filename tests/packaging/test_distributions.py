"""What the wheel and the sdist carry, and that the wheel runs without the source beside it."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    # in the environment's own build folder, whose objects are there; .ci/run builds from nothing
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    command = [sys.executable, "-m", "pip", "wheel", *options, f"--wheel-dir={folder}", str(ROOT)]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, timeout=240)
    (built,) = folder.glob("tiercache-*.whl")
    return built


def tracked_modules() -> set[str]:
    """The installed names of every source file of the three rooms."""
    names = {
        f"tiercache/{path.relative_to(ROOT)}"
        for room in ("runtime", "policies")
        for path in (ROOT / room).rglob("*.py")
    }
    names |= {str(path.relative_to(ROOT)) for path in (ROOT / "tiercache").rglob("*.py")}
    return {name for name in names if "__pycache__" not in name}


# What the device codecs are compiled from where they run.
DEVICE_SOURCES = {
    f"tiercache/csrc/codec_{name}"
    for name in ("kernels.cu", "steps.hpp", "window.hpp", "quant.hpp", "float.hpp", "device.hpp")
}


def test_the_wheel_carries_every_module_and_no_source_of_the_core(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert tracked_modules() <= names
    assert {"tiercache/py.typed", "tiercache/_core.pyi"} <= names
    assert sum(name.startswith("tiercache/_core.") and name.endswith(".so") for name in names) == 1
    allowed = (".py", ".pyi", ".so", "py.typed")
    assert names >= DEVICE_SOURCES
    inside = [name for name in names - DEVICE_SOURCES if not name.split("/")[0].endswith(".dist-info")]
    assert [name for name in inside if not name.startswith("tiercache/") or not name.endswith(allowed)] == []
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_wheel_runs_from_a_folder_of_its_own(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    code = (
        "import numpy, tiercache, tiercache.cli, tiercache.policies, tiercache.runtime\n"
        "import tiercache._core as core\n"
        "assert tiercache.__file__.startswith(__import__('sys').argv[1]), tiercache.__file__\n"
        "assert core.crc32c(numpy.frombuffer(b'123456789', dtype=numpy.uint8)) == 0xE3069283\n"
        "raise SystemExit(tiercache.cli.main(['--version']))\n"
    )
    # -S keeps an editable install's finder away; the environment's packages come back by their path
    site = [path for path in sys.path if path.endswith("site-packages")]
    site += [
        line
        for folder in site
        for file in Path(folder).glob("*.pth")
        for line in file.read_text().splitlines()
        if os.path.isdir(line)
    ]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path / "site"), *site])}
    command = [sys.executable, "-S", "-c", code, str(tmp_path)]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == wheel.name.split("-")[1]


def test_the_sdist_builds_the_wheel_and_carries_the_tests(tmp_path: Path) -> None:
    code = f"from scikit_build_core.build import build_sdist; print(build_sdist({str(tmp_path)!r}))"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, timeout=60)
    (built,) = tmp_path.glob("tiercache-*.tar.gz")
    with tarfile.open(built) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    expected = [
        "pyproject.toml",
        "CMakeLists.txt",
        "Makefile",
        "LICENSE",
        "README.md",
        "constraints.txt",
        "tests/conftest.py",
    ]
    assert set(expected) <= names
    assert {"tiercache/csrc/module.cpp", "runtime/__init__.py", "policies/__init__.py"} <= names
    assert [
        name for name in names if name.startswith(("build/", ".venv", "dist/")) or "__pycache__" in name
    ] == []
