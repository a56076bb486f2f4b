"""CRC32C: every path gives the same sum, the one of the standard, however the bytes are cut."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest

from tiercache import _core

PATHS = ("vpclmulqdq", "sse4.2", "portable")
# RFC 3720, appendix B.4
KNOWN = [
    (bytes(32), 0x8A9136AA),
    (b"\xff" * 32, 0x62A8AB43),
    (bytes(range(32)), 0x46DD794E),
    (bytes(range(31, -1, -1)), 0x113FDB5C),
    (b"123456789", 0xE3069283),
    (b"", 0),
]


def by(path: str, data: bytes | np.ndarray, crc: int = 0) -> int | None:
    return _core.crc32c_by(path, np.frombuffer(data, np.uint8), crc)


def available() -> list[str]:
    return [path for path in PATHS if by(path, b"") is not None]


def naive(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def test_the_portable_path_is_always_there_and_the_best_one_is_taken():
    assert "portable" in available()
    assert _core.crc32c_path() == available()[0]
    assert by("none such", b"") is None


@pytest.mark.parametrize(("data", "expected"), KNOWN)
def test_the_sums_of_the_standard(data, expected):
    assert _core.crc32c(np.frombuffer(data, np.uint8)) == expected
    assert [by(path, data) for path in available()] == [expected] * len(available())


def test_every_length_around_the_block_sizes_and_every_start_agree():
    memory = np.random.default_rng(1).integers(0, 256, 9000, dtype=np.uint8)
    lengths = {edge + delta for edge in (0, 64, 256, 1024, 3072, 4096, 6144) for delta in range(-17, 18)}
    for length in sorted(length for length in lengths if length >= 0):
        for start in (0, 1, 3, 8, 63):
            data = memory[start : start + length]
            assert len({by(path, data) for path in available()}) == 1, (start, length)
        if length < 300:
            assert by("portable", memory[:length]) == naive(memory[:length].tobytes())


def test_a_sum_continues_over_any_cut():
    rng = random.Random(2)
    data = np.random.default_rng(2).integers(0, 256, 200_000, dtype=np.uint8)
    whole = _core.crc32c(data)
    for path in available():
        for _ in range(50):
            cut = rng.randrange(data.size)
            assert by(path, data[cut:], by(path, data[:cut])) == whole


def test_the_path_that_is_taken_is_no_slower_than_the_portable_one():
    data = np.zeros(1 << 22, np.uint8)

    def fastest(act) -> float:
        times = []
        for _ in range(7):
            started = time.perf_counter()
            act()
            times.append(time.perf_counter() - started)
        return min(times)

    assert fastest(lambda: _core.crc32c(data)) <= 1.2 * fastest(lambda: by("portable", data))
