"""The device codecs on a card: the host's bits, on the caller's stream, without waiting for anything."""

from __future__ import annotations

import time

import pytest
import torch
from codec_pages import activations, decoded, encoded, odd_pages, page_key, same_bits

from tiercache.codecs import create_codec
from tiercache.codecs.device import DeviceCodec
from tiercache.codecs.quant import ELEMENTS

pytestmark = pytest.mark.gpu

PAGES = odd_pages()
LOSSY = ["e4m3", "int8", "int4"]


def device_payload(codec, page, **options):
    out = torch.full((codec.room_bytes(page) + 64,), 0x5A, dtype=torch.uint8, device="cuda")
    length = torch.zeros(1, dtype=torch.int64, device="cuda")
    codec.encode(page, out[:-64], length, **options)
    torch.cuda.synchronize()
    assert bool((out[-64:] == 0x5A).all())
    return out[:-64], length


def device_page(codec, payload, length, like):
    out = torch.zeros_like(like)
    bad = torch.zeros(1, dtype=torch.int32, device="cuda")
    codec.decode(payload, length, out, bad)
    return out, int(bad)


@pytest.mark.parametrize("page", PAGES)
def test_window_has_the_hosts_bits(page):
    tensor, host, codec = PAGES[page], create_codec("window"), DeviceCodec("window")
    payload, length = device_payload(codec, tensor.cuda())
    if int(length) > payload.numel():
        assert page in ("noise", "huge_and_tiny", "denormals", "infinite", "short", "activations", "empty")
        return
    want = encoded(host, tensor)
    if want[0] == 1:
        assert torch.equal(payload[: int(length)].cpu(), torch.from_numpy(want))
    back, bad = device_page(codec, payload, length, tensor.cuda())
    assert not bad
    assert same_bits(back.cpu(), tensor)


@pytest.mark.parametrize("axis", ["tokens", "channels"])
@pytest.mark.parametrize("dtype", list(ELEMENTS), ids=str)
@pytest.mark.parametrize("name", LOSSY)
def test_lossy_formats_have_the_hosts_bits(name, dtype, axis):
    for tensor in (activations((2, 130, 70)), activations((1, 3, 400, 64)), PAGES["infinite"]):
        page = tensor.to(dtype)
        host, codec = create_codec(name, axis=axis), DeviceCodec(name, axis=axis)
        want = encoded(host, page, page_key())
        payload, length = device_payload(codec, page.cuda(), key=page_key(), seed=host.seed_of(page_key()))
        if want[0] == 1:
            assert torch.equal(payload[: int(length)].cpu(), torch.from_numpy(want))
            back, bad = device_page(codec, payload, length, page.cuda())
            assert not bad
            assert same_bits(back.cpu(), decoded(host, want, page))


@pytest.mark.parametrize("name", ["window", *LOSSY])
def test_what_the_host_wrote_the_device_reads(name):
    page, host, codec = activations(), create_codec(name), DeviceCodec(name)
    payload = torch.from_numpy(encoded(host, page))
    length = torch.tensor([payload.numel()], device="cuda")
    back, bad = device_page(codec, payload.cuda(), length, page.cuda())
    assert not bad
    assert same_bits(back.cpu(), decoded(host, payload.numpy(), page))


@pytest.mark.parametrize("name", ["window", *LOSSY])
def test_nothing_waits_for_the_device(name):
    page = activations((8, 1024, 128)).cuda()
    codec = DeviceCodec(name)
    payload, length = device_payload(codec, page)  # compiles
    out, bad = torch.zeros_like(page), torch.zeros(1, dtype=torch.int32, device="cuda")
    codec.decode(payload, length, out, bad)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        out.zero_()
        torch.cuda._sleep(2_000_000_000)
        begin = time.perf_counter()
        torch.cuda.set_sync_debug_mode("error")
        try:
            codec.encode(page, payload, length)
            codec.decode(payload, length, out, bad)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        waited = time.perf_counter() - begin
        assert not stream.query()
    assert waited < 0.3
    stream.synchronize()
    assert int(bad) == 0
    assert name != "window" or same_bits(out.cpu(), page.cpu())


@pytest.mark.parametrize("name", ["window", *LOSSY])
def test_a_length_beyond_the_payload_or_damage_sets_the_flag(name):
    page, codec = activations().cuda(), DeviceCodec(name)
    payload, _ = device_payload(codec, page)
    for wrong in (payload.numel() + 1, 1, 0, -5):
        _, bad = device_page(codec, payload, torch.tensor([wrong], device="cuda"), page)
        assert bad
    torch.cuda.synchronize()
