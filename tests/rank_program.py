"""What each rank of the distributed tests runs: `torchrun tests/rank_program.py FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path

import dense
import pytest
import torch
import trees
from plain_model import build_plain
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tiercache import open_store
from tiercache.errors import InputError, RankFailedError
from tiercache.runtime import prefix_attention
from tiercache.runtime.distributed import DistributedReplay, rank_directory

OPTIONS = {"min_shared_tokens": 1, "check_model": False, "debug": True}
LIMIT = 1e-6


def wrap(kind: str, model: torch.nn.Module) -> torch.nn.Module:
    if kind == "ddp":
        return DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    whole = {}
    for name, parameter in inner.named_parameters():
        grad = parameter.grad
        whole[name] = grad.full_tensor() if isinstance(grad, DTensor) else grad
    return whole


def objective(logps: torch.Tensor) -> torch.Tensor:
    """Not separable over rows."""
    return (
        logps * torch.arange(1.0, 1.0 + logps.numel()).view_as(logps)
    ).sum().tanh() + logps.sum() ** 2 / 100


def follows_one_process(model: torch.nn.Module, replay: DistributedReplay, name: str) -> None:
    rows = trees.make_case(name).rows
    whole = build_plain(prefix_attention, dtype=torch.float32)
    want = dense.weighted_gradients(whole, rows)
    model.zero_grad(set_to_none=True)
    report = replay.backward(rows, dense.weighted_sum)
    error = dense.relative_l2(gradients(model), want)
    assert error <= LIMIT, (name, "backward", error)
    assert report.duplicated_tokens >= 0
    whole.zero_grad(set_to_none=True)
    objective(dense.logprobs(whole, rows)).backward()
    model.zero_grad(set_to_none=True)
    objective(replay.logprobs(*trees.pad(rows))).backward()
    error = dense.relative_l2(gradients(model), dense.gradients(whole))
    assert error <= LIMIT, (name, "logprobs", error)


def fails_together(replay: DistributedReplay) -> None:
    """The last rank's loss raises; every other rank must raise too, and name its error."""
    last = distributed.get_world_size() - 1

    def loss(logps: torch.Tensor, row: object) -> torch.Tensor:
        if distributed.get_rank() == last:
            raise ZeroDivisionError("of the last rank")
        return logps.sum()

    with pytest.raises((RankFailedError, ZeroDivisionError), match="of the last rank") as caught:
        replay.backward(trees.make_case("depth_3").rows, loss)
    if distributed.get_rank() == last:
        assert caught.type is ZeroDivisionError
    else:
        assert f"rank {last} failed; got ZeroDivisionError" in str(caught.value)


def refuses_different_batches(replay: DistributedReplay) -> None:
    rows = trees.make_case("depth_3").rows
    with pytest.raises(InputError, match="different batches"):
        replay.backward(rows[distributed.get_rank() :], dense.weighted_sum)


def main(folder: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    for kind in ("ddp", "fsdp2"):
        model = wrap(kind, build_plain(prefix_attention, dtype=torch.float32))
        disk = rank_directory(folder) / kind
        with open_store(device="4MiB", disk=disk, disk_capacity="64MiB") as store:
            replay = DistributedReplay(model, store, **OPTIONS)
            for name in ("depth_3", "no_shared_prefix", "all_equal"):
                follows_one_process(model, replay, name)
            fails_together(replay)
            refuses_different_batches(replay)
            follows_one_process(model, replay, "one_level")
            assert store.stats().pages == 0
    if distributed.get_rank() == 0:
        (Path(folder) / "done").touch()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
