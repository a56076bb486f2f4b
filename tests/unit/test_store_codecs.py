"""Codecs below the device: bytes are fixed by the first encode, sums are never lossy."""

import pytest
import torch
from codec_pages import activations
from pages import PAGE, grad, key, page, small_store

from tiercache import _core
from tiercache.codecs import CODECS
from tiercache.codecs.base import Codec
from tiercache.codecs.dispatch import INSTRUCTIONS
from tiercache.errors import ConfigError


class HalvingCodec(Codec):
    """Lossy and never the same twice: keeps half of each value, in fp16."""

    name = "halving"
    lossless = False

    def max_encoded_bytes(self, dtype, shape):
        return torch.Size(shape).numel() * 2

    def encode(self, tensor, out, key=None):
        half = (tensor / 2).half().contiguous().view(-1).view(torch.uint8)
        out[: half.numel()] = half.numpy()
        return half.numel()

    def decode(self, payload, out):
        out.copy_(torch.from_numpy(payload.copy()).view(torch.float16).view(out.shape))


class UnstableCodec(HalvingCodec):
    """The same, and says so."""

    name = "unstable"
    stable = False


class RoundingCodec(HalvingCodec):
    """Lossy, and idempotent: rounds to fp16."""

    name = "rounding"

    def encode(self, tensor, out, key=None):
        return super().encode(tensor * 2, out, key)


@pytest.fixture(autouse=True)
def lossy_codecs(monkeypatch):
    monkeypatch.setitem(CODECS, "halving", HalvingCodec)
    monkeypatch.setitem(CODECS, "unstable", UnstableCodec)
    monkeypatch.setitem(CODECS, "rounding", RoundingCodec)


def read(store, name):
    with store.read(name) as lease:
        return lease.tensor.clone()


EVERYWHERE = ["halving", "rounding", "unstable"]
SOMEWHERE = [{"key": {tier: codec}} for tier in ("host", "disk") for codec in EVERYWHERE]
BESIDE = [{"key": {"host": a, "disk": b}} for a, b in (("zstd", "unstable"), ("unstable", "zstd"))]


@pytest.mark.parametrize("codec", [*EVERYWHERE, *SOMEWHERE, *BESIDE], ids=str)
@pytest.mark.parametrize("device", [2, 16])
def test_a_lossy_page_has_one_value_from_its_first_read_on(codec, device):
    values = [torch.linspace(0.1, n + 1, PAGE // 4) for n in range(8)]
    with small_store(device=device, host=2, disk=64, codec=codec) as store:
        first = []
        for n, value in enumerate(values):
            mine = value.clone()
            store.put(key(n), mine, own=True)
            first.append(read(store, key(n)))
            assert not torch.equal(first[n], value)
        for _ in range(3):
            for n in range(8):
                assert torch.equal(read(store, key(n)), first[n])
        for n in range(8):
            assert torch.equal(store.take(key(n)), first[n])


@pytest.mark.parametrize("codec", [*EVERYWHERE, *SOMEWHERE, *BESIDE], ids=str)
@pytest.mark.parametrize("host", [None, 4])
def test_a_lossy_page_that_goes_straight_below_has_that_value_too(codec, host):
    value = torch.linspace(0.1, 1, PAGE // 4)
    with small_store(device=2, host=host, disk=64, codec=codec) as store:
        leases = []
        for n in range(2):
            store.put(key(n), value)
            leases.append(store.read(key(n)))
        store.put(key(5), value)
        assert store._books.table[key(5)].places[0] is None
        expected = leases[0].tensor.clone()
        assert not torch.equal(expected, value)
        for lease in leases:
            lease.release()
        assert torch.equal(read(store, key(5)), expected)


def test_a_lossy_codec_given_alone_leaves_sums_and_layer_inputs_exact():
    value = torch.linspace(0.1, 1, PAGE // 4)
    with small_store(device=1, host=1, disk=64, codec="halving") as store:
        store.put(key(1, "layer_input", 1), value)
        store.put(grad(2), value)
        for _ in range(2):
            store.accumulate(grad(1), value)
        for n in range(4):
            store.put(key(n), page(n))
        assert torch.equal(read(store, key(1, "layer_input", 1)), value)
        assert torch.equal(read(store, grad(2)), value)
        assert torch.equal(store.take(grad(1)), value + value)


def payloads(store):
    """(kind, tier, codec) of every payload below the device."""
    store.flush()
    return {
        (entry.key.kind, tier.name, place.meta.codec)
        for entry in store._books.table.values()
        for tier, place in zip(store._books.tiers[1:], entry.places[1:], strict=True)
        if place is not None
    }


@pytest.mark.parametrize("host", [None, 64])
def test_a_first_encode_that_cannot_be_had_again_is_kept_from_the_put_on(host):
    with small_store(device=16, host=host, disk=64, codec="unstable") as store:
        store.put(key(1), page(3.5))
        assert payloads(store) == {("key", "disk" if host is None else "host", "unstable")}
        assert torch.equal(read(store, key(1)), page(1.75))


def test_it_is_not_kept_where_that_would_cost_another_page_its_place():
    with small_store(device=16, host=1, disk=None, codec={"key": "unstable"}) as store:
        store.put(key(1, "other"), page(1))
        store.put(key(1), page(3.5))
        store.put(key(2), page(3.5))
        assert len(payloads(store)) <= 1
        for n in range(3, 8):
            store.put(key(n, "other"), page(n))
        assert torch.equal(read(store, key(1)), page(1.75))
        assert torch.equal(read(store, key(2)), page(1.75))


def test_int4_pages_stay_int4_all_the_way_down_and_up():
    values = [torch.randn(64, 64, generator=torch.Generator().manual_seed(n)).bfloat16() for n in range(12)]
    with small_store(device=16, host=8, disk=200, codec="int4") as store:
        first = []
        for n, value in enumerate(values):
            store.put(key(n), value)
            first.append(read(store, key(n)))
            assert not torch.equal(first[n], value)
        for _ in range(2):
            for n in range(12):
                assert torch.equal(read(store, key(n)), first[n])
        assert {codec for _, _, codec in payloads(store)} == {"int4"}
        assert store.stats().bytes_used["host"] > 0


def test_codecs_by_kind_and_tier():
    choice = {"key": {"host": "zstd"}, "value": {"disk": "zstd"}, "*": {"host": "const", "disk": "zstd"}}
    with small_store(device=1, host=8, disk=64, codec=choice) as store:
        for n in range(8):
            for kind in ("key", "value", "state"):
                store.put(key(n, kind), page(n))
        found = payloads(store)
        for kind, (host, disk) in {
            "key": ("zstd", "raw"), "value": ("raw", "zstd"), "state": ("const", "zstd"),
        }.items():  # fmt: skip
            # What comes up again keeps the payload that it had below.
            assert {codec for k, tier, codec in found if k == kind and tier == "disk"} <= {disk, host}
            assert {codec for k, tier, codec in found if k == kind and tier == "host"} <= {host, disk}
        assert {("key", "disk", "raw"), ("value", "disk", "zstd"), ("state", "disk", "zstd")} & found
        for n in range(8):
            for kind in ("key", "value", "state"):
                assert torch.equal(read(store, key(n, kind)), page(n))


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"grad_key": "halving"}, "never lossy"),
        ({"grad_value": {"disk": "int8"}}, "never lossy"),
        ({"key": {"host": "int8", "disk": "int4"}}, "two lossy codecs"),
        ({"disk": "int8"}, "tiers where kinds of pages belong"),
        ({"key": {"device": "int8"}}, "keep no payloads"),
        ({"key": {"tape": "int8"}}, "keep no payloads"),
        ({"key": 3}, "neither a name nor"),
        ({"key": {"host": None}}, "neither a name nor"),
        (7, "neither a name nor"),
        ("gzip", "unknown codec"),
        ({"key": {"host": "gzip"}}, "unknown codec"),
    ],
)
def test_choices_that_cannot_be_meant_are_refused(choice, message):
    with pytest.raises(ConfigError, match=message):
        small_store(codec=choice)


@pytest.mark.parametrize("option", [{"codec_instructions": "portable"}, {"codec_threads": 2}])
def test_options_of_native_codecs_without_one_are_refused(option):
    with pytest.raises(ConfigError, match="has no effect"):
        small_store(codec={"key": "zstd"}, **option)
    with small_store(codec={"key": "zstd", "value": {"disk": "exponent"}}, **option):
        pass


def test_unknown_paths_and_no_threads_are_refused():
    with pytest.raises(ConfigError, match="instructions"):
        small_store(codec="window", codec_instructions="sse9")
    with pytest.raises(ConfigError, match="threads"):
        small_store(codec="window", codec_threads=0)


@pytest.mark.parametrize("path", [name for name, n in INSTRUCTIONS.items() if _core.isa_available(n)])
@pytest.mark.parametrize("codec", ["window", "exponent", "int8", "int4"])
def test_each_path_gives_the_same_payloads_through_a_store(codec, path):
    def stored(**options):
        with small_store(device=32, host=200, disk=None, codec=codec, **options) as store:
            for n in range(6):
                store.put(key(n), activations((2, 64, 64), seed=n))
            store.flush()
            values = [read(store, key(n)) for n in range(6)]
            tier, places = store._books.tiers[1], {n: store._books.table[key(n)].places[1] for n in range(6)}
            return values, {
                n: tier.view(place.slot)[: place.meta.stored_bytes].tobytes()
                for n, place in places.items()
                if place is not None
            }

    values, found = stored(codec_instructions=path, codec_threads=2)
    expected_values, expected = stored()
    both = found.keys() & expected.keys()  # which pages went down is a matter of time
    assert len(both) >= 3
    assert all(found[n] == expected[n] for n in both)
    assert all(
        torch.equal(a.view(torch.int16), b.view(torch.int16))
        for a, b in zip(values, expected_values, strict=True)
    )


def test_codecs_by_kind():
    value = torch.zeros(PAGE // 4)
    with small_store(device=1, host=64, disk=None, codec={"key": "zstd", "*": "raw"}) as store:
        for n in range(8):
            store.put(key(n), value + n)
            store.put(key(n, "value"), value + n)
        store.flush()
        codecs = {
            (entry.key.kind, place.meta.codec)
            for entry in store._books.table.values()
            if (place := entry.places[1]) is not None
        }
        assert codecs == {("key", "zstd"), ("value", "raw")}
        for n in range(8):
            assert torch.equal(read(store, key(n)), value + n)


def test_what_a_codec_cannot_shrink_is_kept_raw():
    noise = [torch.randint(0, 256, (PAGE,), dtype=torch.uint8) for _ in range(4)]
    with small_store(device=1, host=8, disk=None, codec="zstd") as store:
        for n, tensor in enumerate(noise):
            store.put(key(n), tensor)
        store.flush()
        assert store.stats().bytes_peak["host"] <= 4 * PAGE
        for n, tensor in enumerate(noise):
            assert torch.equal(read(store, key(n)), tensor)
