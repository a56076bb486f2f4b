"""Transformers' Trainer, Lightning and accelerate: the same parameters as without a store."""

from contextlib import nullcontext

import dense
import model_zoo
import pytest
import tiny_trl
import torch
import trees
from torch import nn
from torch.utils.data import DataLoader

from tiercache import open_store
from tiercache.runtime import BranchReplay, offload

pytestmark = [
    tiny_trl.WARNINGS,
    pytest.mark.filterwarnings("ignore:.*(does not have many workers|pin_memory).*", "ignore::UserWarning"),
]
OFFLOAD = {"min_bytes": 1, "keep_last_bytes": 0}


@pytest.fixture
def store(tmp_path):
    with open_store(device="8KiB", disk=tmp_path / "store", disk_capacity="64MiB") as opened:
        yield opened


@pytest.fixture(autouse=True)
def _fresh_accelerate():
    """accelerate keeps one state a process; the next test wants its own."""
    from accelerate.state import AcceleratorState

    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def _batches(count=6):
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(1, 60, (12,), generator=generator) for _ in range(count)]
    return [{"input_ids": i, "labels": i.clone()} for i in ids]


def _transformers(folder, callbacks):
    from transformers import Trainer, TrainingArguments

    model = model_zoo.build("llama", dtype=torch.float32)
    args = TrainingArguments(
        output_dir=str(folder), use_cpu=True, report_to="none", save_strategy="no", max_steps=3,
        per_device_train_batch_size=2, learning_rate=1e-2, disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip
    Trainer(model=model, args=args, train_dataset=_batches(), callbacks=callbacks).train()
    return model


def test_transformers_callback(tmp_path, store):
    from tiercache.runtime.trainers.transformers import TierCallback

    want = _transformers(tmp_path / "plain", [])
    got = _transformers(tmp_path / "tier", [TierCallback(store, **OFFLOAD)])
    assert all(map(torch.equal, got.parameters(), want.parameters()))
    assert "forward" not in vars(got)
    assert store.stats().puts > 0
    assert store.stats().pages == 0


def _fit(folder, **given):
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            with model_zoo.seeded(0):
                self.net = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1))

        def training_step(self, batch, index):
            return self.net(batch).pow(2).mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    module = Module()
    data = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    lightning.Trainer(
        default_root_dir=folder, accelerator="cpu", max_epochs=2, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, **given,
    ).fit(module, DataLoader(data, batch_size=4))  # fmt: skip
    return module


@pytest.mark.parametrize("kind", ["callbacks", "plugins"])
def test_lightning(tmp_path, store, kind):
    from tiercache.runtime.trainers import lightning as tier

    given = tier.TierCallback if kind == "callbacks" else tier.TierPrecision
    want = _fit(tmp_path)
    got = _fit(tmp_path, **{kind: [given(store, **OFFLOAD)]})
    assert all(map(torch.equal, got.parameters(), want.parameters()))
    assert "training_step" not in vars(got)
    assert store.stats().puts > 0
    assert store.stats().pages == 0


def _accelerate(rows, store, precision, context=nullcontext()):  # noqa: B008 - holds nothing
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=2)
    model = model_zoo.build("llama", dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    prepared, optimizer = accelerator.prepare(model, optimizer)
    options = {"min_shared_tokens": 1, "check_model": False}
    replay = BranchReplay(model, store, **options) if store is not None else None
    for half in (rows[: len(rows) // 2], rows[len(rows) // 2 :]):
        with accelerator.accumulate(prepared), accelerator.autocast(), context:
            logps = replay.logprobs(*trees.pad(half)) if replay else dense.logprobs(model, half)
            accelerator.backward(logps.sum())
    return dense.gradients(model)


def test_accelerate_accumulates_to_the_gradient_of_dense_training(store):
    rows = trees.make_case("depth_3").rows
    want, got = _accelerate(rows, None, "no"), _accelerate(rows, store, "no")
    assert dense.relative_l2(got, want) < 5e-6


def test_accelerate_in_bf16_is_no_further_from_fp32_than_dense_training(store):
    rows = trees.make_case("depth_3").rows
    exact = _accelerate(rows, None, "no")
    noise = dense.relative_l2(_accelerate(rows, None, "bf16"), exact)
    error = dense.relative_l2(_accelerate(rows, store, "bf16"), exact)
    assert 1e-4 < error < 1.5 * noise


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_offload_inside_accelerate_is_bit_for_bit(store, precision):
    rows = trees.make_case("depth_3").rows
    want = _accelerate(rows, None, precision)
    got = _accelerate(rows, None, precision, offload(store, **OFFLOAD))
    assert want.keys() == got.keys()
    assert all(torch.equal(got[name], want[name]) for name in want)
    assert store.stats().puts > 0
    assert store.stats().pages == 0
