"""The device codecs and copies on a card, for device_check.py: bits against the host, then speeds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tiercache.codecs import create_codec
from tiercache.codecs.device import DeviceCodec, DeviceFormat
from tiercache.entry import PageKey

FORMATS: tuple[DeviceFormat, ...] = ("window", "e4m3", "int8", "int4")
KEY = PageKey(bytes(range(32)), 3, "key")
MIB = 1 << 20


def sample(mebibytes: int) -> torch.Tensor:
    """A bf16 page with channel scales and outliers, [1, heads, tokens, 128]."""
    generator = torch.Generator().manual_seed(0)
    tokens = mebibytes * MIB // 2 // 8 // 128
    channels = torch.randn(128, generator=generator).exp()
    page = torch.randn(1, 8, tokens, 128, generator=generator) * channels
    page.view(-1)[::9973] *= 1e4
    return page.to(torch.bfloat16)


def device_ms(work: Callable[[], None], rounds: int = 20) -> float:
    """Median milliseconds on the device."""
    for _ in range(3):
        work()
    times = []
    for _ in range(rounds):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


class _Buffers:
    """What one format needs on the device for one page."""

    def __init__(self, name: DeviceFormat, axis: str, page: torch.Tensor) -> None:
        self.codec = DeviceCodec(name, axis=axis)
        self.page = page.cuda()
        self.payload = torch.zeros(self.codec.room_bytes(page), dtype=torch.uint8, device="cuda")
        self.length = torch.zeros(1, dtype=torch.int64, device="cuda")
        self.back = torch.zeros_like(self.page)
        self.bad = torch.zeros(1, dtype=torch.int32, device="cuda")

    def encode(self, seed: int) -> None:
        self.codec.encode(self.page, self.payload, self.length, key=KEY, seed=seed)

    def decode(self) -> None:
        self.codec.decode(self.payload, self.length, self.back, self.bad)


def check_bits(name: DeviceFormat, axis: str, page: torch.Tensor) -> dict[str, Any]:
    """Whether device and host agree on payload and page."""
    params = {} if name == "window" else {"axis": axis}
    host = create_codec(name, **params)
    seed = 0 if name == "window" else host.seed_of(KEY)  # type: ignore[attr-defined]
    out = np.zeros(host.max_encoded_bytes(page.dtype, tuple(page.shape)), np.uint8)
    want = torch.from_numpy(out[: host.encode(page, out, KEY)])
    buffers = _Buffers(name, axis, page)
    buffers.encode(seed)
    buffers.decode()
    again = torch.empty_like(page)
    host.decode(want.numpy(), again)
    length = int(buffers.length)
    return {
        "payload_equal": length == want.numel() and bool(torch.equal(buffers.payload[:length].cpu(), want)),
        "page_equal": bool(torch.equal(buffers.back.cpu().view(torch.int16), again.view(torch.int16))),
        "bad": int(buffers.bad),
    }


def speeds(name: DeviceFormat, axis: str, page: torch.Tensor) -> dict[str, float]:
    """GB/s of page bytes, from the caller's stream."""
    buffers = _Buffers(name, axis, page)
    encode = device_ms(lambda: buffers.encode(1))
    decode = device_ms(buffers.decode)
    return {
        "ratio": page.nbytes / int(buffers.length),
        "encode_gbps": page.nbytes / encode / 1e6,
        "decode_gbps": page.nbytes / decode / 1e6,
    }


def codecs_part() -> dict[str, Any]:
    """Bits and speeds of every format and axis."""
    begin = time.perf_counter()
    small, large = sample(4), sample(64)
    result: dict[str, Any] = {"compile_s": 0.0, "bits": {}, "speeds": {}}
    _Buffers("window", "channels", small).encode(0)
    torch.cuda.synchronize()
    result["compile_s"] = round(time.perf_counter() - begin, 1)
    for name in FORMATS:
        for axis in ("tokens", "channels") if name != "window" else ("channels",):
            result["bits"][f"{name}/{axis}"] = check_bits(name, axis, small)
            result["speeds"][f"{name}/{axis}"] = speeds(name, axis, large)
    bits = result["bits"].values()
    result["passed"] = all(b["payload_equal"] and b["page_equal"] and not b["bad"] for b in bits)
    return result


def copies_part() -> dict[str, Any]:
    """GB/s between device and host memory for pages of 4 MiB and 64 MiB."""
    result: dict[str, Any] = {}
    for mebibytes in (4, 64):
        device = torch.zeros(mebibytes * MIB, dtype=torch.uint8, device="cuda")
        for name, pinned in (("pinned", True), ("pageable", False)):
            host = torch.zeros(mebibytes * MIB, dtype=torch.uint8, pin_memory=pinned)
            down = device_ms(lambda h=host, d=device: h.copy_(d, non_blocking=True))
            up = device_ms(lambda h=host, d=device: d.copy_(h, non_blocking=True))
            result[f"{name}_{mebibytes}MiB"] = {
                "to_host_gbps": device.nbytes / down / 1e6,
                "to_device_gbps": device.nbytes / up / 1e6,
            }
    return result
