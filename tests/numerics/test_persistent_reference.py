"""A frozen reference's pages outlive the process: a later one reads them, and never those of other weights."""

from __future__ import annotations

import json
import random

import model_zoo
import pytest
import torch
import trees
from disk_pages import flip, only_segment, run_python
from persistent_reference import batches, frozen, opened, step

from tiercache import open_store
from tiercache.entry import PageKey
from tiercache.errors import ConfigError
from tiercache.runtime.reference import Reference
from tiercache.tiers.disk_reader import DiskReader

ONE_LIFE = """
import sys; from pathlib import Path; from persistent_reference import one_life
one_life(Path(sys.argv[1]), int(sys.argv[2]), flush=sys.argv[3] == "True")
"""


def test_later_processes_read_the_prompt_whatever_ended_the_earlier_ones(tmp_path):
    def life(number, *, flush):
        return tuple(json.loads(run_python(ONE_LIFE, tmp_path, number, flush, check=False)))

    first, second = batches()
    assert life(0, flush=False) == (0, 40)
    assert life(1, flush=True) in ((0, 40), (40, 0))  # what was not flushed may cost a capture
    for rows in (first, second):
        with opened(tmp_path) as store:
            assert step(Reference(frozen(), store, weights_id="a", min_shared_tokens=1), rows) == (40, 0)
    with opened(tmp_path) as store:
        assert step(Reference(frozen(), store, weights_id="b", min_shared_tokens=1), first) == (0, 40)


@pytest.mark.parametrize("durability", ["process", "power"])
@pytest.mark.parametrize("host", [None, "1MiB"])
def test_a_model_of_transformers_is_known_by_its_tensors_and_configuration(tmp_path, durability, host):
    first, second = batches()

    def run(rows, change=lambda model: None, **options):
        model = model_zoo.build("llama").requires_grad_(requires_grad=False)
        change(model)
        with opened(tmp_path, durability=durability, host=host, **options) as store:
            return step(Reference(model, store, min_shared_tokens=1), rows)

    def write_unseen(model):
        next(model.parameters()).data[0, 0] += 1

    def other_rotary(model):
        model.config.rope_parameters = {**model.config.rope_parameters, "rope_theta": 77.0}

    assert run(first) == (0, 40)
    assert run(second) == (40, 0)
    assert run(second, lambda model: next(model.parameters()).mul_(2)) == (0, 40)
    assert run(second, write_unseen) == (0, 40)
    assert run(second, lambda model: model.to(torch.float32)) == (0, 40)
    assert run(second, namespace=b"another user") == (0, 40)
    assert run(first) == (40, 0)
    with opened(tmp_path, durability=durability) as store:
        model = model_zoo.build("llama").requires_grad_(requires_grad=False)
        other_rotary(model)
        reference = Reference(model, store, min_shared_tokens=1)
        reference.logprobs(*trees.pad(first))
        assert reference.report.captured_tokens == 40


def test_a_write_that_leaves_the_version_alone_is_seen_while_the_process_lives(tmp_path):
    first, second = batches()
    for options in ({"durability": "process"}, {"durability": "scratch"}):
        model = model_zoo.build("llama").requires_grad_(requires_grad=False)
        with opened(tmp_path / options["durability"], **options) as store:
            reference = Reference(model, store, min_shared_tokens=1)
            assert step(reference, first) == (0, 40)
            for parameter in model.parameters():
                parameter.data.mul_(0.9)  # as trainers synchronise a reference
            assert step(reference, second) == (0, 40)
            assert step(reference, first) == (40, 0)


def test_a_name_of_the_users_counts_until_the_weights_change(tmp_path):
    first, second = batches()
    model = frozen()
    with opened(tmp_path) as store:
        assert step(Reference(model, store, weights_id="a", min_shared_tokens=1), first) == (0, 40)
        assert step(Reference(model, store, weights_id="b", min_shared_tokens=1), second) == (0, 40)
        reference = Reference(model, store, weights_id="a", min_shared_tokens=1)
        assert step(reference, second) == (40, 0)
        model.layers[0].down.weight.mul_(1.1)
        assert step(reference, second) == (0, 40)
        assert step(reference, first) == (40, 0)
    for dtype, wide in ((torch.float32, False), (torch.float64, True)):
        other = frozen(dtype=dtype, options=[{}, {}, {}, {}] if wide else None)
        with opened(tmp_path) as store:
            assert step(Reference(other, store, weights_id="a", min_shared_tokens=1), first) == (0, 40)


def test_other_windows_of_a_plain_module_are_other_pages(tmp_path):
    rows = batches()[0]
    for options, told in (([{}] * 3, (0, 40)), ([{"window": 9}] * 3, (0, 40)), ([{}] * 3, (40, 0))):
        with opened(tmp_path) as store:
            reference = Reference(frozen(options=options), store, weights_id="a", min_shared_tokens=1)
            reference.logprobs(*trees.pad(rows))
            assert (reference.reused_tokens, reference.report.captured_tokens) == told


@pytest.mark.parametrize("name", ["depth_3", "shared_scores", "no_shared_prefix"])
def test_whole_trees_come_back(tmp_path, name):
    rows = trees.make_case(name).rows
    told = []
    for _ in range(2):
        with opened(tmp_path) as store:
            told.append(step(Reference(frozen(), store, weights_id="a", min_shared_tokens=1), rows))
    assert told[0][0] == 0
    assert told[1] == (told[0][1], 0)


def test_scored_prompt_tokens_that_were_not_kept_cost_a_capture_once(tmp_path):
    rows = batches()[0]
    ids, mask, scored = trees.pad(rows)
    wider = scored.clone()
    wider[:, 20:] = mask[:, 20:].bool()
    for asked, told in ((scored, (0, 40)), (wider, (0, 40)), (wider, (40, 0)), (scored, (40, 0))):
        with opened(tmp_path) as store:
            reference = Reference(frozen(), store, weights_id="a", min_shared_tokens=1)
            reference.logprobs(ids, mask, asked)
            assert (reference.reused_tokens, reference.report.captured_tokens) == told


def test_bad_records_are_captured_again(tmp_path):
    rows = batches()[0]
    with opened(tmp_path) as store:
        step(Reference(frozen(), store, weights_id="a", min_shared_tokens=1), rows)
    rng = random.Random(5)
    for _ in range(6):
        reader = DiskReader(tmp_path)
        entries = list(reader.entries())
        reader.close()
        assert len(entries) == 3 * 2 + 2  # keys and values of three layers, hidden states and their offsets
        entry = rng.choice(entries)
        flip(only_segment(tmp_path), entry.offset + rng.randrange(4096 + entry.meta.stored_bytes) % 4600, 3)
        with opened(tmp_path) as store:
            reference = Reference(frozen(), store, weights_id="a", min_shared_tokens=1)
            assert step(reference, rows) == (0, 40)
            assert step(reference, rows) == (40, 0)
    with opened(tmp_path) as store:
        assert step(Reference(frozen(), store, weights_id="a", min_shared_tokens=1), rows) == (40, 0)


def test_pages_beyond_max_prompts_are_taken_up_from_disk(tmp_path):
    maker = trees._Maker(61, 5)
    prompts = [
        [maker.row(p, maker.tokens(3)) for _ in range(2)] for p in (maker.tokens(20) for _ in range(4))
    ]
    with opened(tmp_path) as store:
        reference = Reference(frozen(), store, weights_id="a", max_prompts=1, min_shared_tokens=1)
        assert [step(reference, rows) for rows in prompts] == [(0, 20)] * 4
        store.flush()
        assert [step(reference, rows) for rows in prompts] == [(20, 0)] * 4
        reference.clear()
        assert store.stats().pages == 0
        assert sum(store.stats().bytes_used.values()) == 0
        assert store.stats().bytes_kept > 4 * 8 * 4096


def test_a_disk_that_cannot_hold_all_prompts_keeps_the_latest_and_nothing_fails(tmp_path):
    maker = trees._Maker(61, 7)
    prompts = [
        [maker.row(p, maker.tokens(3)) for _ in range(2)] for p in (maker.tokens(40) for _ in range(24))
    ]
    told = []
    for _ in range(2):
        with opened(tmp_path, disk_capacity="1MiB") as store:
            reference = Reference(frozen(), store, weights_id="a", max_prompts=2, min_shared_tokens=1)
            told.append([step(reference, rows) for rows in reversed(prompts[-12:])])
            told.append([step(reference, rows) for rows in prompts])
            assert store.stats().bytes_used["disk"] + store.stats().bytes_kept <= 1 << 20
    assert told[2].count((40, 0)) >= 3
    assert told[2].count((0, 40)) >= 1


def test_nothing_is_kept_unless_asked_for(tmp_path):
    rows = batches()[0]
    for _ in range(2):
        with opened(tmp_path, durability="scratch") as store:
            assert not store.keeps_pages
            assert step(Reference(frozen(), store, min_shared_tokens=1), rows) == (0, 40)


def test_what_has_no_effect_is_an_error(tmp_path):
    page, device = torch.ones(4), torch.device("cpu")
    with opened(tmp_path / "a", durability="scratch") as store:
        with pytest.raises(ConfigError, match="weights_id"):
            Reference(frozen(), store, weights_id="a")
        with pytest.raises(ConfigError, match="keeps no pages"):
            store.put(PageKey(bytes(32), 0, "key"), page, persistent=True)
        assert not store.claim([PageKey(bytes(32), 0, "key")], device)
    with opened(tmp_path / "b") as store:
        with pytest.raises(ConfigError, match=r"PlainGPT.*weights_id"):
            Reference(frozen(), store)
        with pytest.raises(ConfigError, match="graph"):
            store.put(PageKey(bytes(32), 0, "key", 1), page, persistent=True)
        assert store.stats().pages == 0
    with pytest.raises(ConfigError, match="scratch"):
        open_store(device="64KiB", disk=tmp_path / "b", disk_capacity="64MiB")
    with pytest.raises(ConfigError, match="without a directory"):
        open_store(durability="process")
    with pytest.raises(ConfigError, match="scratch, process, power"):
        open_store(disk=tmp_path, disk_capacity="1MiB", durability="forever")


def test_durability_can_come_from_a_file(tmp_path):
    (tmp_path / "store.toml").write_text(
        f'device = "64KiB"\ndisk = "{tmp_path}/disk"\ndisk_capacity = "64MiB"\ndurability = "power"\n'
    )
    with open_store(config=tmp_path / "store.toml") as store:
        assert store.keeps_pages
