import json

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from pages import PAGE, key, page, small_store

from tiercache import StoreConfig
from tiercache.config import parse_size
from tiercache.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [(5, 5), ("7", 7), ("2KiB", 2048), ("1.5 MiB", 3 << 19), ("8GiB", 8 << 30), ("500GB", 500 * 10**9)],
)
def test_sizes(text, num_bytes):
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "8 gibs", "-1", -1, True, 1.5, None])
def test_what_is_no_size(text):
    with pytest.raises(ConfigError):
        parse_size(text)


@pytest.mark.parametrize(
    "options",
    [
        {"device": 0},
        {"disk_capacity": "1GiB"},
        {"disk": "/tmp"},
        {"disk": "/tmp", "disk_capacity": 0},
        {"disk": [], "disk_capacity": "1GiB"},
        {"timeout_s": 0},
        {"transfer_threads": 0},
        {"namespace": "text"},
        {"trace": "/no/such/directory/trace.parquet"},
        {"host": "lots"},
    ],
)
def test_options_that_cannot_be_meant(options):
    with pytest.raises(ConfigError):
        StoreConfig(**options)


def test_traces_and_timelines_are_written_at_close(tmp_path):
    trace, timeline = tmp_path / "trace.parquet", tmp_path / "timeline.json"
    with small_store(device=2, host=4, disk=None, trace=trace, timeline=timeline) as store:
        for n in range(4):
            store.put(key(n), page(n))
        for n in range(4):
            store.read(key(n)).release()
    table = pq.read_table(trace)
    assert table.column_names[:5] == ["time", "key", "op", "bytes", "tier"]
    assert "insert" in table["op"].to_pylist()
    table = table.filter(pc.equal(table["policy"].cast("string"), ""))  # the rest is what policies were asked
    assert table["op"].to_pylist() == ["put"] * 4 + ["read"] * 4
    assert table["key"].to_pylist() == [0, 1, 2, 3] * 2
    assert set(table["bytes"].to_pylist()) == {PAGE}
    assert "host" in table["tier"].to_pylist()
    events = json.loads(timeline.read_text())["traceEvents"]
    assert {event["name"] for event in events} >= {"device->host"}
    assert all(event["dur"] >= 0 for event in events if event["ph"] == "X")
