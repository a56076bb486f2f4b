"""Other processes, other kernels' rules and full file systems."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import torch
from disk_pages import MIB, check_hit, environment, key_of, put, run_python

from tiercache import open_store
from tiercache.entry import PageKey
from tiercache.errors import StoreLockedError, TierFullError
from tiercache.tiers.disk import DiskTier


def spawn(code: str, *args: object) -> subprocess.Popen[str]:
    """A child that prints a line when it has come to its point and then waits for input."""
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, args)],
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def end(child: subprocess.Popen[str], how: signal.Signals = signal.SIGKILL) -> None:
    child.send_signal(how)
    child.wait(30)
    child.stdin.close()
    child.stdout.close()


WRITER = """
    import sys; from disk_pages import *
    tier = DiskTier(sys.argv[1], 16 * MIB, durability="process")
    [put(tier, n) for n in range(3)]
    tier.flush()
    print("ready", flush=True)
    sys.stdin.read()
"""

READER = """
    import sys; from disk_pages import *
    from tiercache.tiers.disk_reader import DiskReader
    reader = DiskReader(sys.argv[1])
    with reader.lease(key_of(1).digest) as lease:
        assert np.array_equal(lease.read(), data_of(1, lease.entry.meta.stored_bytes))
        print("ready", flush=True)
        sys.stdin.readline()
        assert np.array_equal(lease.read(), data_of(1, lease.entry.meta.stored_bytes))
        print("still there", flush=True)
        sys.stdin.readline()
    print("gone", flush=True)
    sys.stdin.read()
"""


def test_a_second_writer_gets_the_pid_of_the_first_and_its_death_frees_the_lock(tmp_path):
    writer = spawn(WRITER, tmp_path)
    assert writer.stdout.readline() == "ready\n"
    with pytest.raises(StoreLockedError, match=f"pid {writer.pid}"):
        DiskTier(tmp_path, 16 * MIB)
    end(writer)
    tier = DiskTier(tmp_path, 16 * MIB, durability="process")
    assert all(check_hit(tier, number) for number in range(3))
    with pytest.raises(StoreLockedError, match="this process"):
        DiskTier(tmp_path, 16 * MIB)
    tier.close()


@pytest.mark.parametrize("end_of_reader", ["released", "killed"])
def test_a_leased_record_is_not_overwritten_until_the_lease_ends(tmp_path, end_of_reader):
    tier = DiskTier(tmp_path, 8 * MIB, durability="process")
    put(tier, 1, 3 * MIB)
    tier.flush()
    reader = spawn(READER, tmp_path)
    assert reader.stdout.readline() == "ready\n"
    tier.remove(key_of(1).digest)
    tier.flush()
    held = tier.stats()["leased_bytes"]
    assert held >= 3 * MIB
    kept = []
    for number in range(2, 30):  # everything that can be reused is
        try:
            kept.append(put(tier, number, MIB))
        except TierFullError:
            tier.free(kept.pop())
    assert tier.stats()["leased_bytes"] == held
    tier.check_integrity()
    if end_of_reader == "released":
        reader.stdin.write("\n")
        reader.stdin.flush()
        assert reader.stdout.readline() == "still there\n"
        reader.stdin.write("\n")
        reader.stdin.flush()
        assert reader.stdout.readline() == "gone\n"
    end(reader)
    for number in range(100, 110):
        slot = put(tier, number, MIB)
        tier.free(slot)
        if tier.stats()["leased_bytes"] == 0:
            break
        with pytest.raises(TierFullError):
            tier.reserve(7 * MIB)
    assert tier.stats()["leased_bytes"] == 0
    tier.close()


def test_readers_meet_a_busy_writer(tmp_path):
    """Two readers look up, lease and compare while the writer replaces everything: hits are right or misses."""
    code = """
        import sys, time; from disk_pages import *
        from tiercache.errors import PageCorruptError, PageMissingError
        from tiercache.tiers.disk_reader import DiskReader
        reader, hits, end = DiskReader(sys.argv[1]), 0, time.monotonic() + 3
        print("ready", flush=True)
        while time.monotonic() < end:
            for number in range(40):
                try:
                    with reader.lease(key_of(number).digest) as lease:
                        assert np.array_equal(lease.read(), data_of(number, lease.entry.meta.stored_bytes))
                        hits += 1
                except PageMissingError:
                    pass
        print(hits, flush=True)
    """
    tier = DiskTier(tmp_path, 8 * MIB, durability="process")
    put(tier, 0)
    tier.flush()
    readers = [spawn(code, tmp_path) for _ in range(2)]
    assert [reader.stdout.readline() for reader in readers] == ["ready\n"] * 2
    number = 0
    while any(reader.poll() is None for reader in readers):
        number = (number + 1) % 40
        tier.remove(key_of(number).digest)
        put(tier, number)
        time.sleep(0.0005)
    assert [reader.returncode for reader in readers] == [0, 0]
    assert all(int(reader.stdout.readline()) > 0 for reader in readers)
    for reader in readers:
        reader.stdin.close()
        reader.stdout.close()
    tier.check_integrity()
    tier.close()


@pytest.mark.parametrize(
    "ending", ["", "del tier", "kept = tier; raise SystemExit(0)", "os.fork() or sys.exit(0); os.wait()"]
)
def test_a_tier_that_nobody_closes_ends_with_its_process_and_keeps_its_records(tmp_path, ending):
    code = f"""
import os, sys; from disk_pages import *
tier = DiskTier(sys.argv[1], 16 * MIB, durability="process")
put(tier, 1)
{ending}
"""
    run_python(code, tmp_path)
    tier = DiskTier(tmp_path, 16 * MIB, durability="process")
    assert check_hit(tier, 1)
    tier.close()


def test_a_forked_child_gets_an_error_and_touches_nothing(tmp_path):
    code = """
        import os, sys; from disk_pages import *
        from tiercache.errors import StoreForkedError
        tier = DiskTier(sys.argv[1], 16 * MIB, durability="process")
        slot = put(tier, 1)
        pid = os.fork()
        if pid == 0:
            refused = 0
            for act in (lambda: tier.reserve(5), lambda: get(tier, slot, 1), lambda: tier.lookup(bytes(32)),
                        lambda: tier.free(slot), lambda: tier.flush(), lambda: tier.used_bytes, lambda: tier.stats()):
                try:
                    act()
                except StoreForkedError as error:
                    refused += "spawn" in str(error)
            tier.close()
            del tier
            os._exit(0 if refused == 7 else 1)
        assert os.waitpid(pid, 0)[1] == 0
        get(tier, slot, 1)
        put(tier, 2)
        tier.close()
        print("fine")
    """
    assert run_python(textwrap.dedent(code), tmp_path) == "fine\n"


def test_a_forked_child_does_not_keep_the_lock(tmp_path):
    code = """
        import os, sys, time; from disk_pages import *
        tier = DiskTier(sys.argv[1], 16 * MIB)
        if os.fork() == 0:
            sys.stdin.read()
            os._exit(0)
        print("ready", flush=True)
        time.sleep(60)
    """
    parent = spawn(code, tmp_path)
    assert parent.stdout.readline() == "ready\n"
    parent.send_signal(signal.SIGKILL)
    parent.wait(30)
    DiskTier(tmp_path, 16 * MIB).close()
    parent.stdin.close()  # ends the child
    parent.stdout.close()


def test_a_stopped_process_finds_its_reads_when_it_goes_on(tmp_path):
    """Ctrl-Z for longer than any deadline: the drive's thread stood still as well, and gets a moment to catch up."""
    code = """
        import sys; from disk_pages import *
        tier = DiskTier(sys.argv[1], 16 * MIB, faults=True, timeout_s=1)
        slot = put(tier, 1, 2 * MIB)
        tier.core.add_fault("read", "late", delay_ms=3000, times=1)
        print("ready", flush=True)
        get(tier, slot, 1)
        print("fine", flush=True)
        tier.close()
    """
    child = spawn(code, tmp_path)
    assert child.stdout.readline() == "ready\n"
    time.sleep(0.2)
    child.send_signal(signal.SIGSTOP)
    time.sleep(2.4)
    child.send_signal(signal.SIGCONT)
    assert child.stdout.readline() == "fine\n"
    end(child)


NO_URING = """
    import ctypes, errno, struct, sys
    libc = ctypes.CDLL(None, use_errno=True)
    BPF = [(0x20, 0, 0, 0), (0x35, 0, 3, 425), (0x25, 2, 0, 427), (0x06, 0, 0, 0x50000 | errno.EPERM),
           (0x06, 0, 0, 0x7FFF0000), (0x06, 0, 0, 0x7FFF0000)]
    code = b"".join(struct.pack("HBBI", *line) for line in BPF)
    buffer = ctypes.create_string_buffer(code)
    program = struct.pack("HxxxxxxQ", len(BPF), ctypes.addressof(buffer))
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    assert libc.prctl(22, 2, program, 0, 0) == 0
"""


def test_without_io_uring_the_threads_carry_on(tmp_path):
    """A filter that answers io_uring's system calls with EPERM, as io_uring_disabled=2 does."""
    code = textwrap.dedent(NO_URING) + textwrap.dedent("""
        from disk_pages import *
        from tiercache.errors import ConfigError
        tier = DiskTier(sys.argv[1], 16 * MIB)
        rung = tier.stats()["drives"][0]["rung"]
        assert rung.startswith("threads+") and "no io_uring: io_uring_setup: Operation not permitted" in rung, rung
        get(tier, put(tier, 1, 3 * MIB), 1)
        tier.close()
        try:
            DiskTier(sys.argv[1], 16 * MIB, engine="io_uring")
        except ConfigError as error:
            print("fine")
    """)
    assert run_python(code, tmp_path) == "fine\n"


def test_memlock_zero_changes_nothing(tmp_path):
    code = textwrap.dedent("""
        import resource, sys, ctypes
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))
        libc = ctypes.CDLL(None)
        libc.prctl(24, 14, 0, 0, 0)  # drop CAP_IPC_LOCK where there is one
        from disk_pages import *
        tier = DiskTier(sys.argv[1], 16 * MIB)
        get(tier, put(tier, 1, 3 * MIB), 1)
        print(tier.stats()["drives"][0]["rung"].split("+")[0] in ("io_uring", "threads"))
        tier.close()
    """)
    assert run_python(code, tmp_path) == "True\n"


def in_namespace(mounts: str, code: str, *args: object) -> str:
    """Runs `code` where `mounts` (shell) has mounted something for it alone."""
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    script = f'set -e; {mounts}; exec "$0" "$@"'
    prefix = ("unshare", "--mount", *user, "sh", "-c", script)
    return run_python(textwrap.dedent(code), *args, prefix=prefix)


FILL = """
    import sys; from disk_pages import *
    from tiercache.errors import TierFullError, TierIOError
    tier = DiskTier(sys.argv[1], 1 << 30, durability="process")
    slots = []
    try:
        while True:
            slots.append((len(slots), put(tier, len(slots), 900_000)))
    except TierFullError as error:
        message = str(error)
    assert "the file system has no room for more" in message and "900000" in message, message
    assert tier.stats()["growth_refused"] > 0
    for number, slot in slots:
        get(tier, slot, number)
    for number, slot in slots[:4]:
        tier.free(slot)
    try:
        tier.flush(5)
        again = put(tier, 99, 900_000)
        get(tier, again, 99)
    except TierIOError as error:  # not even the index finds room
        assert "index" in str(error) or "flush" in str(error) or "No space" in str(error), error
    tier.check_integrity()
    tier.close()
    import contextlib, io, json
    from tiercache.cli import main
    said = io.StringIO()
    with contextlib.redirect_stdout(said):  # what is full can be emptied
        assert main(["store", "verify", sys.argv[1], "--json"]) == 0
        said.truncate(said.seek(0))
        assert main(["store", "gc", sys.argv[1], "--all", "--json"]) == 0
    assert json.loads(said.getvalue())["file_bytes"] == 0
    print(len(slots))
"""


def test_a_full_tmpfs_is_used_to_the_end_and_then_full(tmp_path):
    stored = int(in_namespace(f"mount -t tmpfs -o size=16m none {tmp_path}", FILL, tmp_path))
    assert 10 <= stored <= 17


def test_a_full_sparse_loop_file_is_used_to_the_end_and_then_full(tmp_path):
    """Loop devices belong to the initial user namespace: without that right, a smaller tmpfs takes its place."""
    (tmp_path / "disk").mkdir()
    mounts = (
        f"truncate -s 24M {tmp_path}/image; mkfs.ext4 -q -F -m 0 {tmp_path}/image; "
        f"mount -o loop {tmp_path}/image {tmp_path}/disk 2>/dev/null || mount -t tmpfs -o size=12m none {tmp_path}/disk"
    )
    stored = int(in_namespace(mounts, FILL, tmp_path / "disk" / "store"))
    assert 6 <= stored <= 26


def test_a_read_only_directory_is_a_read_only_store(tmp_path):
    tier = DiskTier(tmp_path, 16 * MIB, durability="process")
    for number in range(3):
        put(tier, number)
    tier.close()
    code = """
        import logging, sys; from disk_pages import *
        from tiercache.errors import TierFullError
        lines = []
        logging.getLogger("tiercache").addFilter(lambda record: True)
        handler = logging.Handler(); handler.emit = lambda record: lines.append(record.getMessage())
        logging.getLogger("tiercache.tiers.disk").addHandler(handler)
        tier = DiskTier(sys.argv[1], 16 * MIB, durability="process")
        assert tier.read_only and all(check_hit(tier, n) for n in range(3)) and not check_hit(tier, 3)
        try:
            tier.reserve(5)
        except TierFullError as error:
            assert "read-only" in str(error)
        assert tier.used_bytes == tier.capacity_bytes > 0 and tier.stats()["drives"][0]["rung"] == "read-only"
        tier.check_integrity(); tier.flush(); tier.close()
        print(len([line for line in lines if "read-only" in line]))
    """
    mounts = f"mount --bind {tmp_path} {tmp_path}; mount -o remount,ro,bind {tmp_path}"
    assert in_namespace(mounts, code, tmp_path) == "1\n"


def test_the_command_line_on_a_read_only_directory(tmp_path):
    tier = DiskTier(tmp_path, 16 * MIB, durability="process")
    put(tier, 1)
    tier.close()
    code = """
        import sys
        from tiercache.cli import main
        assert [main(["store", command, sys.argv[1]]) for command in ("info", "ls", "verify")] == [0, 0, 0]
        assert [main(["store", command, sys.argv[1]]) for command in ("gc", "rebuild")] == [2, 2]
    """
    mounts = f"mount --bind {tmp_path} {tmp_path}; mount -o remount,ro,bind {tmp_path}"
    assert "records" in in_namespace(mounts, code, tmp_path)


def test_a_store_over_a_read_only_directory_reads_what_was_kept(tmp_path):
    page, key, other = torch.arange(5000), PageKey(bytes(32), 0, "key"), PageKey(bytes(32), 1, "key")
    options = {"device": "1MiB", "disk": tmp_path, "disk_capacity": "16MiB", "durability": "process"}
    with open_store(**options) as store:
        store.put(key, page, persistent=True)
    code = """
        import sys, torch
        from tiercache import open_store
        from tiercache.entry import PageKey
        key, other = PageKey(bytes(32), 0, "key"), PageKey(bytes(32), 1, "key")
        with open_store(device="1MiB", disk=sys.argv[1], disk_capacity="16MiB", durability="process") as store:
            assert not store.claim([other], torch.device("cpu"))
            assert store.claim([key], torch.device("cpu"))
            with store.read(key) as lease:
                assert torch.equal(lease.tensor, torch.arange(5000))
            store.put(other, torch.ones(3), persistent=True)  # stays in memory
            store.flush()
            store.check_integrity()
            store.discard([key, other])
            store.check_integrity()
            print(sum(store.stats().bytes_used.values()))
    """
    mounts = f"mount --bind {tmp_path} {tmp_path}; mount -o remount,ro,bind {tmp_path}"
    assert in_namespace(mounts, code, tmp_path) == "0\n"
    with open_store(**options) as store:
        assert store.claim([key], torch.device("cpu"))
        assert not store.claim([other], torch.device("cpu"))


def test_a_directory_that_refuses_is_an_error(tmp_path):
    code = """
        import sys; from disk_pages import *
        from tiercache.errors import TierIOError
        try:
            DiskTier(sys.argv[1], 16 * MIB)
        except TierIOError as error:
            print(error.errno)
    """
    mounts = f"mount --bind {tmp_path} {tmp_path}; mount -o remount,ro,bind {tmp_path}"
    assert in_namespace(mounts, code, tmp_path) == "30\n"
