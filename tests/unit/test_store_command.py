"""`tiercache store` on a real directory."""

from __future__ import annotations

import json
import os
import pty
import shutil
import signal
import subprocess
import sys
from contextlib import redirect_stderr

import lmdb
import pytest
from disk_pages import MIB, NAMESPACE, environment, flip, key_of, only_segment, put, run_python, size_of
from typer.testing import CliRunner

from tiercache.cli import main
from tiercache.cli.store_command import app
from tiercache.errors import ConfigError, PageCorruptError, StoreLockedError, TierIOError
from tiercache.tiers.disk import DiskTier
from tiercache.tiers.disk_reader import DiskReader, RecordLease

COMMANDS = ["info", "ls", "verify", "gc", "rebuild"]


@pytest.fixture
def root(tmp_path):
    tier = DiskTier(tmp_path, 16 * MIB, durability="process")
    for number in range(4):
        put(tier, number)
    tier.close()
    return tmp_path


def run(*arguments: object, status: int = 0):
    done = CliRunner().invoke(app, [*map(str, arguments)])
    assert done.exit_code == status, done.output
    return done


def said(*arguments: object, status: int = 0):
    return json.loads(run(*arguments, "--json", status=status).stdout)


def test_info(root):
    found = said("info", root)
    assert (found["records"], found["durability"], found["writer_pid"]) == (4, "process", None)
    assert found["namespaces"] == {NAMESPACE.hex(): 4}
    assert found["payload_bytes"] == sum(size_of(number) for number in range(4))
    assert "durability" in run("info", root).stdout


def test_ls(root):
    rows = {row["key"]: row for row in said("ls", root)}
    row = rows[key_of(2).digest.hex()]
    assert (row["layer"], row["kind"], row["dtype"], row["shape"]) == (2, "key", "uint8", [size_of(2)])
    assert (row["codec"], row["stored_bytes"], row["hits"]) == ("raw", size_of(2), 0)
    assert 0 <= row["age_s"] < 1000
    assert len(said("ls", root, "--limit", 2)) == 2
    assert key_of(2).digest.hex()[:8] in run("ls", root).stdout


def test_verify_finds_a_bad_record_and_says_so_by_its_exit_status(root):
    assert said("verify", root)["bad"] == []
    entry = next(entry for entry in DiskReader(root).entries() if entry.meta.digest == key_of(1).digest)
    flip(only_segment(root), entry.offset + 4096, 5)
    found = said("verify", root, status=1)
    assert (found["records"], len(found["bad"])) == (4, 1)
    assert "payload checksum" in found["bad"][0]
    assert str(key_of(1)) in found["bad"][0]
    only_segment(root).unlink()
    assert len(said("verify", root, status=1)["bad"]) == 4


def test_verify_goes_on_behind_a_record_that_the_drive_does_not_give(root, monkeypatch):
    read = RecordLease.read

    def fail_one(lease, out=None):
        if lease.entry.meta.digest == key_of(1).digest:
            raise TierIOError("disk tier: read", got="Input/output error")
        return read(lease, out)

    monkeypatch.setattr(RecordLease, "read", fail_one)
    found = said("verify", root, status=1)
    assert (found["records"], len(found["bad"])) == (4, 1)
    assert "Input/output error" in found["bad"][0]


def test_verify_finds_damaged_entries_of_the_index(root):
    with lmdb.open(str(root / "index")) as env, env.begin(write=True) as txn:
        key, value = next(iter(txn.cursor()))
        txn.put(key, value[:-5])
    found = said("verify", root, status=1)
    assert (found["records"], found["bad"]) == (3, ["1 entries of the index are damaged: rebuild it"])
    assert said("rebuild", root)["adopted"] == 4
    assert said("verify", root)["bad"] == []


WRITER = """
import sys, time; from disk_pages import *
tier = DiskTier(sys.argv[1], 16 * MIB, durability="process")
for number in range(4, 7):
    put(tier, number)
tier.flush()
print("ready", flush=True)
time.sleep(60)
"""


def test_beside_a_writer_and_after_its_kill_9(root):
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(root)], env=environment(), stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout.readline() == "ready\n"
    assert (said("info", root)["records"], said("info", root)["writer_pid"]) == (7, writer.pid)
    assert len(said("ls", root)) == said("verify", root)["records"] == 7
    for command in ("gc", "rebuild"):
        done = CliRunner().invoke(app, [command, str(root)])
        assert done.exit_code == 1
        assert isinstance(done.exception, StoreLockedError)
        assert str(writer.pid) in str(done.exception)
    writer.send_signal(signal.SIGKILL)
    writer.communicate()
    assert said("info", root)["writer_pid"] is None
    assert len(said("ls", root)) == said("verify", root)["records"] == 7
    assert said("rebuild", root)["adopted"] == 7
    assert said("gc", root, "--all")["removed_records"] == 7
    assert said("ls", root) == []


def test_gc(root):
    (root / "drive0" / "0050.seg").write_bytes(b"x" * 9000)
    assert said("gc", root)["removed_records"] == 0
    assert said("gc", root, "--namespace", "ffff")["removed_records"] == 0
    assert not (root / "drive0" / "0050.seg").exists()
    assert said("gc", root, "--older-than-days", 1)["removed_records"] == 0
    assert said("info", root)["records"] == 4
    found = said("gc", root, "--namespace", NAMESPACE.hex()[:8])
    assert (found["removed_records"], found["file_bytes"]) == (4, 0)
    assert said("info", root)["records"] == 0


def test_rebuild(root):
    shutil.rmtree(root / "index")
    found = said("rebuild", root)
    assert (found["found"], found["adopted"], found["bad"]) == (4, 4, [])
    assert said("info", root)["records"] == 4
    assert "adopted" in run("rebuild", root).stdout


def test_a_directory_without_a_store_is_an_error(tmp_path):
    for command in COMMANDS:
        done = CliRunner().invoke(app, [command, str(tmp_path)])
        assert done.exit_code == 1
        assert "no store in" in str(done.exception)


@pytest.fixture
def on_terminal(monkeypatch):
    """Runs the command line with a terminal as its standard error; gives what that was sent."""
    monkeypatch.setenv("TERM", "xterm")
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)

    def act(*arguments: object) -> str:
        ours, theirs = pty.openpty()
        os.set_blocking(ours, False)
        with open(ours, "rb") as screen, open(theirs, "w") as stream, redirect_stderr(stream):
            assert main(["store", *map(str, arguments)]) == 0
            return (screen.read() or b"").decode()

    return act


@pytest.mark.parametrize("command", COMMANDS)
def test_progress_is_shown_on_a_terminal_alone_and_goes(root, capsys, on_terminal, command):
    shown = on_terminal(command, root)
    assert ("segments" if command == "rebuild" else "records") in shown
    assert shown.endswith("\x1b[2K")  # its line is cleared
    assert "━" not in capsys.readouterr().out
    assert on_terminal(command, root, "--json") == ""
    assert run(command, root).stderr == ""  # no terminal


@pytest.mark.parametrize(
    "option",
    [["--older-than-days", "-1"], ["--namespace", ""], ["--namespace", "zz"], ["--namespace", "0" * 65]],
)
def test_gc_refuses_what_cannot_be_meant(root, option):
    run("gc", root, *option, status=2)
    assert said("info", root)["records"] == 4


@pytest.fixture
def drives(tmp_path):
    """Directories of a store of three drives."""
    homes = [tmp_path / name for name in "abc"]
    tier = DiskTier(homes, 64 * MIB, durability="process")
    for number in range(4):
        put(tier, number)
    tier.close()
    return homes


@pytest.mark.parametrize("command", COMMANDS)
def test_directories_in_another_order_or_elsewhere_are_an_error(drives, command):
    first, second, third = drives
    elsewhere = first.parent / "elsewhere"
    for wrong in ([first, third, second], [first, second, elsewhere], [first, second], [first, *drives]):
        done = CliRunner().invoke(app, [command, *map(str, wrong)])
        assert isinstance(done.exception, ConfigError), done.output
    assert not elsewhere.exists()
    assert sorted(path.name for home in drives for path in home.glob("drive*")) == [
        "drive0",
        "drive1",
        "drive2",
    ]
    assert said("verify", *drives)["records"] == 4


def test_an_open_in_another_order_loses_nothing(drives):
    with pytest.raises(ConfigError, match="has no drive1 of this store; got \\['drive2'\\]"):
        DiskTier([drives[0], drives[2], drives[1]], 64 * MIB, durability="process")
    assert said("verify", *drives)["records"] == 4


@pytest.mark.parametrize("command", COMMANDS)
def test_a_symlink_to_a_store_is_not_followed(root, command):
    link = root.parent / f"link-{root.name}"
    link.symlink_to(root)
    done = CliRunner().invoke(app, [command, str(link)])
    assert isinstance(done.exception, ConfigError)
    assert "symlink" in str(done.exception)


@pytest.mark.parametrize("damage", ["cut", "a page"])
def test_a_damaged_index_is_an_error_and_not_a_crash(root, damage):
    """LMDB trusts its file: it would crash in the process that opens this one."""
    path = root / "index" / "data.mdb"
    content = bytearray(path.read_bytes())
    content[8192:] = b"" if damage == "cut" else os.urandom(len(content) - 8192)
    path.write_bytes(content)
    for command in ("info", "ls", "verify"):
        done = CliRunner().invoke(app, [command, str(root)])
        assert isinstance(done.exception, PageCorruptError), done.output
        assert "tiercache store rebuild" in str(done.exception)
    assert said("rebuild", root)["adopted"] == 4
    assert said("verify", root)["records"] == 4


def test_an_entry_of_the_index_that_is_none_is_counted(root):
    with lmdb.open(str(root / "index")) as env, env.begin(write=True) as txn:
        key, value = next(iter(txn.cursor()))
        txn.put(key, value[:230] + b"\xff" * 16 + value[246:])  # text that is none
    assert (said("info", root)["records"], said("info", root)["damaged_entries"]) == (3, 1)
    assert len(said("ls", root)) == 3


KILLED = """
import os, random, signal, sys, time
from tiercache.cli import main
from disk_pages import *
from tiercache.tiers.disk_reader import DiskReader
root, command = sys.argv[1:3]
for seed in range(8):
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        main(["store", command, root, *sys.argv[3:]])
        os._exit(0)
    time.sleep(random.Random(seed).uniform(0, 0.04))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert main(["store", "verify", root]) == 0
    reader = DiskReader(root)
    assert command == "gc" or reader.count() == 4
    reader.close()
assert main(["store", "rebuild", root]) == main(["store", "verify", root]) == 0
"""


@pytest.mark.parametrize("command", [["gc", "--all"], ["rebuild"]])
def test_kill_9_of_gc_and_rebuild_leaves_a_store_that_verifies(root, command):
    run_python(KILLED, root, *command)
    if command == ["rebuild"]:
        assert said("info", root)["records"] == 4
