"""Who may import whom, what an import may cost, and names that would hide a module."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
ROOMS = {"policies": 0, "tiercache": 1, "runtime": 2}
HEAVY = ["cupy", "lightning", "matplotlib", "peft", "pyarrow", "transformers", "trl"]


def source_files() -> list[Path]:
    return [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]


def imported(path: Path) -> list[tuple[int, str]]:
    """(line, dotted name) of everything that a file imports, wherever in the file."""
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
    return names


def room_of(name: str) -> str | None:
    parts = name.split(".")
    if parts[0] != "tiercache":
        return None
    return parts[1] if len(parts) > 1 and parts[1] in ROOMS else "tiercache"


def test_imports_go_one_way() -> None:
    wrong = []
    for path in source_files():
        relative = path.relative_to(ROOT)
        if relative.parts[:2] == ("tiercache", "cli") or relative == Path("tiercache/__init__.py"):
            continue  # the command line and the front door see every room
        for line, name in imported(path):
            room = room_of(name)
            if room is not None and ROOMS[room] > ROOMS[relative.parts[0]]:
                wrong.append(f"{relative}:{line} imports {name}")
    assert wrong == []


@pytest.mark.parametrize("folder", ["policies", "tiercache", "runtime", "tests", "bench"])
def test_rooms_are_imported_under_their_installed_names(folder: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line, name in imported(path)
        if name.split(".")[0] in ("runtime", "policies")
    ]
    assert wrong == []


def test_errors_cost_nothing_to_import() -> None:
    """Their root stands in the lowest room, and neither file needs anything else."""
    assert {name for _, name in imported(ROOT / "policies" / "errors.py")} == {"__future__.annotations"}
    above = {name.rpartition(".")[0] for _, name in imported(ROOT / "tiercache" / "errors.py")}
    assert above == {"__future__", "tiercache.policies.errors"}


def test_policies_never_import_torch() -> None:
    wrong = [
        str(path)
        for path in (ROOT / "policies").rglob("*.py")
        if any(n.split(".")[0] == "torch" for _, n in imported(path))
    ]
    assert wrong == []


def loaded_after(statement: str) -> set[str]:
    code = f"{statement}\nimport sys; print(*{{name.split('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    ("statement", "forbidden"),
    [
        ("import tiercache", ["numba", "torch", "numpy", "psutil", *HEAVY]),
        ("import tiercache.cli; tiercache.cli.main(['--help'])", ["numba", "torch", *HEAVY]),
        ("import tiercache.policies", ["torch", "tiercache.store", *HEAVY]),
        ("import tiercache.tiers, tiercache.codecs", HEAVY),
        ("import tiercache.runtime", HEAVY),
    ],
)
def test_an_import_loads_only_what_it_needs(statement: str, forbidden: list[str]) -> None:
    assert sorted(loaded_after(statement) & set(forbidden)) == []


def test_no_exported_function_bears_the_name_of_its_module() -> None:
    packages = ["tiercache", "tiercache.policies", "tiercache.runtime", "tiercache.tiers", "tiercache.codecs"]
    wrong = []
    for name in packages:
        package = importlib.import_module(name)
        submodules = {module.name for module in pkgutil.iter_modules(package.__path__)}
        for exported in getattr(package, "__all__", dir(package)):
            value = getattr(package, exported)
            if exported in submodules and not isinstance(value, type(sys)):
                wrong.append(f"{name}.{exported}")
    assert wrong == []
