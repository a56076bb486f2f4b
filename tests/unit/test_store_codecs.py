"""Codecs below the device: bytes are fixed by the first encode, sums are never lossy."""

import pytest
import torch
from pages import PAGE, grad, key, page, small_store

from tiercache.codecs import CODECS
from tiercache.codecs.base import Codec
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


class RoundingCodec(HalvingCodec):
    """Lossy, and idempotent: rounds to fp16."""

    name = "rounding"

    def encode(self, tensor, out, key=None):
        return super().encode(tensor * 2, out, key)


@pytest.fixture(autouse=True)
def lossy_codecs(monkeypatch):
    monkeypatch.setitem(CODECS, "halving", HalvingCodec)
    monkeypatch.setitem(CODECS, "rounding", RoundingCodec)


def read(store, name):
    with store.read(name) as lease:
        return lease.tensor.clone()


@pytest.mark.parametrize("codec", ["halving", "rounding"])
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


def test_a_lossy_page_that_goes_straight_below_has_that_value_too():
    value = torch.linspace(0.1, 1, PAGE // 4)
    with small_store(device=2, host=None, disk=64, codec="halving") as store:
        leases = []
        for n in range(2):
            store.put(key(n), value)
            leases.append(store.read(key(n)))
        store.put(key(5), value)
        expected = leases[0].tensor.clone()
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


def test_gradient_kinds_refuse_lossy_codecs():
    with pytest.raises(ConfigError, match="never lossy"):
        small_store(codec={"grad_key": "halving"})


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
