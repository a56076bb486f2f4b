"""What each rank of the test of TRL under DDP runs: `torchrun tests/trl_ranks.py FOLDER MODEL`."""

from __future__ import annotations

import sys
from pathlib import Path

import tiny_trl
import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from trl import DPOTrainer, GRPOTrainer

from tiercache import open_store
from tiercache.runtime.distributed import rank_directory
from tiercache.runtime.trainers.trl import TierDPOTrainer, TierGRPOTrainer

STEPS = 2


def same_on_every_rank(vector: torch.Tensor) -> bool:
    first = vector.clone()
    distributed.broadcast(first, 0)
    return torch.equal(first, vector)


def main(folder: Path, model: Path) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    ranks = distributed.get_world_size()
    for plain, tier in ((GRPOTrainer, TierGRPOTrainer), (DPOTrainer, TierDPOTrainer)):
        _, want = tiny_trl.train(plain, model, max_steps=STEPS)
        disk = rank_directory(folder / tier.__name__)
        with open_store(device="64KiB", disk=disk, disk_capacity="64MiB") as store:
            trainer, got = tiny_trl.train(tier, model, store, max_steps=STEPS)
            assert isinstance(trainer.model_wrapped, DistributedDataParallel)
            distance = got.distance(want)
            assert distance <= 1e-3, (tier.__name__, distance)
            assert same_on_every_rank(got.vectors[-1])
            rows = 2 * trainer.args.gradient_accumulation_steps if plain is DPOTrainer else 8
            assert trainer.step_report.num_rows == rows
            assert store.stats().puts > 0
            assert store.stats().pages == 0
        (folder / f"{tier.__name__}-{distributed.get_rank()}-of-{ranks}").touch()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
