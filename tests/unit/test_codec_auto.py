"""auto: what it measures, what it chooses, and when it leaves a page alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from codec_pages import activations, decoded, encoded, odd_pages, page_key, same_bits

from tiercache.codecs import create_codec
from tiercache.errors import CodecError, ConfigError


class Clock:
    """Tells time by what is coded: each look at it moves it by the next of the given steps."""

    def __init__(self, coded_s):
        self._steps = iter([step for s in coded_s for step in (0.0, s, s)])
        self._now = 0.0

    def __call__(self):
        self._now += next(self._steps)
        return self._now


def chosen(read_gbps, decode_s, page=None):
    page = activations() if page is None else page
    codec = create_codec("auto", read_gbps=read_gbps, clock=Clock(decode_s))
    payload = encoded(codec, page, page_key())
    assert same_bits(decoded(codec, payload, page), page)
    return codec.choices()[f"key/{page.dtype}"]


# Seconds that raw, const, window, exponent and zstd take to encode or decode a page of 150 kB.
FAST = [1.5e-5, 2e-5, 1e-5, 3e-5, 1.5e-4]


def test_a_slow_tier_takes_the_smallest_page():
    assert chosen(1.0, FAST) == "exponent"


def test_a_fast_tier_takes_what_decodes_fast():
    assert chosen(12.0, FAST) == "window"


def test_raw_when_compression_does_not_pay():
    assert chosen(50.0, [1e-6, 1e-4, 1e-4, 1e-4, 1e-3]) == "raw"


def test_noise_is_stored_raw():
    page = odd_pages()["noise"]
    codec = create_codec("auto", read_gbps=0.5)
    assert encoded(codec, page, page_key()).size == page.nbytes + 1


def test_a_kind_has_its_own_codec_and_measures_again():
    steps = [*FAST, *FAST, 1e-3, 1e-3, 1e-4, 1e-6, 1e-3]
    codec = create_codec("auto", read_gbps=12.0, clock=Clock(steps))
    page = activations()
    for _ in range(256):
        encoded(codec, page, page_key())
    assert codec.choices() == {"key/torch.bfloat16": "window"}
    encoded(codec, page, page_key("value"))
    assert set(codec.choices().values()) == {"window"}
    encoded(codec, page, page_key())
    assert codec.choices() == {"key/torch.bfloat16": "exponent", "value/torch.bfloat16": "window"}


def test_the_choice_follows_the_tiers_speed_without_another_measurement():
    codec = create_codec("auto", read_gbps=1.0, clock=Clock([1e-6, *FAST[1:]]))
    page = activations()
    for speed, name in ((1.0, "exponent"), (200.0, "raw"), (12.0, "window")):
        codec.tell_speed(speed)
        assert encoded(codec, page, page_key())[0] == {"raw": 0, "window": 2, "exponent": 3}[name]
        assert codec.choices() == {"key/torch.bfloat16": name}
    for _ in range(400):
        codec.observe(10**9, 1.0)
    encoded(codec, page, page_key())
    assert codec.choices() == {"key/torch.bfloat16": "exponent"}


def test_small_pages_are_not_worth_a_measurement():
    codec = create_codec("auto", clock=Clock([]))
    page = torch.zeros(100, dtype=torch.bfloat16)
    assert same_bits(decoded(codec, encoded(codec, page), page), page)
    assert codec.choices() == {}


def test_pages_outlive_what_auto_has_learned():
    page = activations()
    payload = encoded(create_codec("auto", read_gbps=0.3), page, page_key())
    assert same_bits(decoded(create_codec("auto", read_gbps=300.0), payload, page), page)


def test_wrong_numbers_are_refused():
    page = activations()
    payload = encoded(create_codec("auto"), page)
    payload[0] = 250
    with pytest.raises(CodecError, match="names no codec"):
        decoded(create_codec("auto"), payload, page)
    for read_gbps in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="read_gbps"):
            create_codec("auto", read_gbps=read_gbps)


def test_it_is_lossless_so_gradients_may_use_it():
    codec = create_codec("auto")
    page = torch.randn(64, 64)
    assert codec.lossless
    assert same_bits(decoded(codec, np.asarray(encoded(codec, page, page_key("grad_key"))), page), page)


def test_a_gain_that_a_measurement_may_have_made_up_leaves_pages_raw():
    """raw, const and window cost the same here, give or take a tenth each time: no choice may come of that."""
    measured = [[1.5e-5, 1.4e-5, 1.55e-5, 1e-3, 1e-3], [1.4e-5, 1.5e-5, 1.3e-5, 1e-3, 1e-3]] * 3
    codec = create_codec("auto", read_gbps=20.0, clock=Clock([s for turn in measured for s in turn]))
    page = activations()
    for _ in range(256 * len(measured)):
        assert encoded(codec, page, page_key())[0] == 0


@pytest.mark.parametrize(("window_s", "name"), [(1.1e-5, "raw"), (0.6e-5, "window")])
def test_a_codec_is_used_where_it_is_clearly_cheaper(window_s, name):
    assert chosen(12.0, [1e-6, 1e-3, window_s, 1e-3, 1e-3]) == name


def test_a_codec_that_makes_pages_no_smaller_is_never_chosen():
    """However fast it is: its payloads would be kept raw all the same, after a copy for nothing."""
    codec = create_codec("auto", read_gbps=200.0, clock=Clock([1e-3, 1e-6, 1e-3, 1e-3, 1e-3]))
    encoded(codec, odd_pages()["noise"], page_key())
    assert codec.choices() == {"key/torch.bfloat16": "raw"}


def leaves(codec, page, payload=None, kind="key"):
    return codec.leaves(payload, page.dtype, page_key(kind), page.nbytes)


def test_pages_that_stay_as_they_are_need_no_copy():
    page = activations()
    codec = create_codec("auto", read_gbps=200.0, clock=Clock([*FAST[:1], *[1e-3] * 4] * 2))
    assert not leaves(codec, page)  # not measured yet
    encoded(codec, page, page_key())
    for _ in range(255):
        assert leaves(codec, page)
        assert not leaves(codec, page, np.array([2], np.uint8))
    assert not leaves(codec, page)  # it is time to measure again
    assert not leaves(codec, page, kind="value")
    assert leaves(codec, torch.zeros(10))


def test_payloads_of_another_tier_stay_where_both_choose_alike():
    page = activations()
    codec = create_codec("auto", read_gbps=12.0, clock=Clock(FAST))
    payload = encoded(codec, page, page_key())
    assert leaves(codec, page, payload)
    assert not leaves(codec, page)
    codec.tell_speed(1.0)
    assert not leaves(codec, page, payload)
