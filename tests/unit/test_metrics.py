"""Counters for other programs: TensorBoard's writer, Prometheus' text, `tiercache top`."""

from __future__ import annotations

import json
import re
import threading
import urllib.error
import urllib.request
from typing import Any

import pytest
import torch

from tiercache import PageKey, TierStore, open_store
from tiercache.cli import main
from tiercache.errors import ConfigError
from tiercache.metrics import MetricsServer, prometheus_text, write_scalars


@pytest.fixture
def store() -> Any:
    """A store that has moved a page down and up."""
    with open_store(device=8192, host=1 << 16) as opened:
        for number in range(4):
            opened.put(PageKey(bytes([number]) * 32, 0, "key"), torch.zeros(1024))
        opened.read(PageKey(bytes(32), 0, "key")).release()
        yield opened


def numbers_of(text: str) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in (line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#")
    }


def test_prometheus_gets_every_number_once_with_its_type(store: TierStore) -> None:
    stats = store.stats()
    text = prometheus_text(stats)
    found = numbers_of(text)
    assert found['tiercache_bytes_used{tier="device"}'] == stats.bytes_used["device"] > 0
    assert (
        found['tiercache_bytes_moved_total{direction="device->host"}']
        == stats.bytes_moved["device->host"]
        > 0
    )
    assert found["tiercache_reads_total"] == 1
    told = [v for v in stats.as_dict().values() if not isinstance(v, str)]
    assert len(found) == sum(len(v) if isinstance(v, dict) else 1 for v in told)
    types = re.findall(r"^# TYPE (\S+) (gauge|counter)$", text, re.MULTILINE)
    assert len(types) == len({name for name, _ in types}) == len(told)
    assert all(name.endswith("_total") == (kind == "counter") for name, kind in types)


def test_a_tensorboard_writer_gets_every_number(store: TierStore) -> None:
    class Writer:
        def __init__(self) -> None:
            self.seen: dict[str, tuple[float, int]] = {}

        def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
            self.seen[tag] = scalar_value, global_step

    writer, stats = Writer(), store.stats()
    write_scalars(writer, stats, 7)
    assert writer.seen["tiercache/bytes_moved/device_to_host"] == (stats.bytes_moved["device->host"], 7)
    assert writer.seen["tiercache/stall_s"] == (stats.stall_s, 7)
    assert len(writer.seen) == len(numbers_of(prometheus_text(stats)))


def test_the_endpoint_answers_with_the_counters_of_now_and_ends(store: TierStore) -> None:
    threads = threading.active_count()
    with MetricsServer(store) as server:
        with urllib.request.urlopen(f"{server.url}/metrics") as answer:
            assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
            assert numbers_of(answer.read().decode())["tiercache_pages"] == 4
        store.put(PageKey(b"n" * 32, 0, "key"), torch.zeros(16))
        with urllib.request.urlopen(f"{server.url}/stats") as answer:
            assert json.loads(answer.read())["pages"] == 5
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"{server.url}/pages")
        with pytest.raises(ConfigError, match="cannot listen"):
            MetricsServer(store, int(server.url.rsplit(":", 1)[1]))
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"{server.url}/metrics", timeout=2)
    assert threading.active_count() <= threads


def test_top_shows_a_running_store(store: TierStore, capsys: pytest.CaptureFixture[str]) -> None:
    with MetricsServer(store) as server:
        assert main(["top", server.url, "--interval", "0.05", "--count", "2"]) == 0
    printed = capsys.readouterr().out
    for word in ("occupancy", "device", "host", "device->host", "hit ratio", "stalled"):
        assert word in printed


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "ftp://127.0.0.1", "nowhere"])
def test_top_without_a_store_is_one_line(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", url]) == 2
    assert capsys.readouterr().err.startswith("tiercache: error: top: no")
