"""Offload over tiers that fail, processes that die and processes that fork."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from offload_steps import (
    EVERYTHING,
    Gradients,
    assert_empty,
    assert_equal,
    batch,
    gradients_of,
    small_store,
    tiny_model,
)

from tiercache.errors import PageCorruptError, PageMissingError, StoreForkedError, TierFullError, TierIOError
from tiercache.runtime import offload
from tiercache.testing import FaultTier, MemoryTier
from tiercache.testing.tiers import failing
from tiercache.tiers.disk import DiskTier

MIB = 1 << 20


def forward(store: Any, seed: int = 1) -> tuple[torch.nn.Module, torch.Tensor]:
    model = tiny_model(4, dropout=0.0)
    with offload(store, **EVERYTHING):
        loss = model(batch(seed)).square().sum()
    return model, loss


def dense(seed: int = 1) -> Gradients:
    model = tiny_model(4, dropout=0.0)
    model(batch(seed)).square().sum().backward()
    return gradients_of(model)


class Switch:
    """A fault that can be turned on when a graph is there already."""

    def __init__(self, operation: str, code: int) -> None:
        self.fault, self.on = failing(operation, code), False

    def __call__(self, operation: str, num_bytes: int) -> Any:
        return self.fault(operation, num_bytes) if self.on else None


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_trap_24_a_write_that_fails_raises_with_its_errno_and_other_graphs_stay(code: int) -> None:
    switch = Switch("write", code)
    with small_store(
        device="64KiB", host=None, disk=FaultTier(MemoryTier(MIB * 8, name="disk"), switch)
    ) as store:
        model, loss = forward(store)
        switch.on = True
        with pytest.raises((TierIOError, TierFullError)) as caught:
            forward(store, 2)
        if code == errno.EIO:
            assert isinstance(caught.value, TierIOError)
            assert caught.value.errno == code
        caught = None  # its frames hold the broken graph
        switch.on = False
        loss.backward()
        assert_equal(gradients_of(model), dense())
        del loss
        assert_empty(store)


def test_trap_24_a_read_that_fails_raises_with_its_errno_and_can_be_tried_again() -> None:
    switch = Switch("read", errno.EIO)
    with small_store(
        device="32KiB", host=None, disk=FaultTier(MemoryTier(MIB * 8, name="disk"), switch)
    ) as store:
        model, loss = forward(store)
        other_model, other_loss = forward(store, 2)
        store.flush()
        switch.on = True
        with pytest.raises(TierIOError) as caught:
            loss.backward(retain_graph=True)
        assert caught.value.errno == errno.EIO
        switch.on = False
        gradients_of(model)
        loss.backward()
        assert_equal(gradients_of(model), dense())
        other_loss.backward()
        assert_equal(gradients_of(other_model), dense(2))
        del loss, other_loss, caught
        assert_empty(store)


@pytest.mark.parametrize("kind", ["read", "write"])
def test_trap_24_short_transfers_are_completed(kind: str, tmp_path: Path) -> None:
    disk = DiskTier(tmp_path, 64 * MIB, segment_bytes=8 * MIB, faults=True)
    with small_store(device="32KiB", host=None, disk=disk) as store:
        for cut in (17, 4096):
            disk.core.add_fault(kind, "short", bytes=cut, times=4)
        model, loss = forward(store)
        store.flush()
        loss.backward()
        assert disk.core.fault_hits > 0
        disk.core.clear_faults()
        assert_equal(gradients_of(model), dense())


def test_trap_24_a_damaged_record_raises_and_other_graphs_stay(tmp_path: Path) -> None:
    with small_store(tmp_path, device="32KiB", host=None) as store:
        model, loss = forward(store)
        store.flush()
        for segment in tmp_path.rglob("*.seg"):
            with segment.open("r+b") as file:
                file.seek(8192)
                while chunk := file.read(MIB):
                    file.seek(-len(chunk), os.SEEK_CUR)
                    file.write(bytes(byte ^ 0x55 for byte in chunk))
        # A page that a look-ahead brought up, and found damaged, is gone when backward asks for it.
        with pytest.raises((PageCorruptError, PageMissingError)):
            loss.backward()
        gradients_of(model)
        del loss
        store.flush()
        assert_empty(store)
        model, loss = forward(store)
        loss.backward()
        assert_equal(gradients_of(model), dense())


def test_trap_25_what_a_killed_process_left_is_reclaimed(tmp_path: Path) -> None:
    code = f"""
        import os, signal, sys
        sys.path.insert(0, {str(Path(__file__).parent.parent)!r})
        from offload_steps import batch, small_store, tiny_model
        from pathlib import Path
        from tiercache.runtime import offload
        store = small_store(Path({str(tmp_path)!r}), device="32KiB", host=None)
        with offload(store, min_bytes=0, keep_last_bytes=0):
            loss = tiny_model(4)(batch()).sum()
        store.flush()
        assert store.stats().bytes_used["disk"] > 100_000
        print("written", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert "written" in done.stdout
    with small_store(tmp_path, device="32KiB", host=None) as store:
        assert store.stats().bytes_used["disk"] == 0
        model, loss = forward(store)
        loss.backward()
        assert_equal(gradients_of(model), dense())


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*.seg"))}


def test_trap_26_a_forked_child_never_touches_the_parents_files(tmp_path: Path) -> None:
    with small_store(tmp_path, device="32KiB", host=None) as store:
        model, loss = forward(store)
        store.flush()
        before = files_of(tmp_path)
        assert before
        child = os.fork()
        if child == 0:
            status = 1
            try:
                loss.backward()
            except StoreForkedError:
                del loss
                status = 0
            finally:
                os._exit(status)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert files_of(tmp_path) == before
        loss.backward()
        assert_equal(gradients_of(model), dense())
        del loss
        assert_empty(store)
