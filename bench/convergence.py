"""Does it learn the same? GRPO on a task that a tiny model can learn: dense, exact and detached prefix gradients.

A prompt's tokens are all even or all odd; a completion's reward is the share of its tokens of the same parity. The
answer therefore lies in the prompt, and how the prompt is represented is what the prefix gradient trains. Each batch
serves two optimizer steps: the loss of a first one is 0 whatever the policy does. Every contender starts from the same
weights and samples with the same random numbers; the detached run also measures, along its way, how far its gradient
is from the exact one at the same weights.

    python bench/convergence.py --json convergence.json --figure convergence.png [--quick]
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from machine import describe_machine
from transformers import LlamaConfig, LlamaForCausalLM

from tiercache import open_store
from tiercache.runtime import BranchReplay

CONTENDERS = ("dense", "exact", "detached")
VOCAB, PROMPT, COMPLETION = 32, 32, 6
PROMPTS, GENERATIONS = 4, 8
ITERATIONS, EPSILON = 2, 0.2
LEARNING_RATE = 1e-3
ERROR_EVERY = 10


def build(seed: int) -> Any:
    """A Llama of two layers, the same one for a seed."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            attn_implementation="sdpa",
        )
    )


@torch.no_grad()
def sample(model: Any, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [N, T] of prompts and completions, and the rewards [N] of the completions."""
    parity = torch.randint(2, (PROMPTS, 1), generator=generator)
    prompts = 2 * torch.randint(VOCAB // 2, (PROMPTS, PROMPT), generator=generator) + parity
    rows = prompts.repeat_interleave(GENERATIONS, dim=0)
    for _ in range(COMPLETION):
        chances = model(input_ids=rows, use_cache=False, logits_to_keep=1).logits[:, -1].softmax(-1)
        rows = torch.cat([rows, torch.multinomial(chances, 1, generator=generator)], dim=1)
    rewards = (rows[:, PROMPT:] % 2 == rows[:, :1] % 2).float().mean(-1)
    return rows, rewards


def dense_logprobs(model: Any, rows: torch.Tensor, scored: torch.Tensor) -> torch.Tensor:
    """[N, T], each row run whole."""
    logps = model(input_ids=rows[:, :-1], use_cache=False).logits.log_softmax(-1)
    picked = logps.gather(-1, rows[:, 1:, None])[..., 0]
    return torch.cat([picked.new_zeros(len(rows), 1), picked], dim=1) * scored


def loss_of(
    logps: torch.Tensor, old: torch.Tensor, rewards: torch.Tensor, scored: torch.Tensor
) -> torch.Tensor:
    """GRPO's clipped objective: advantages within each group, mean over completion tokens."""
    groups = rewards.view(PROMPTS, GENERATIONS)
    advantages = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).view(-1, 1)
    ratio = torch.exp(logps - old)
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - EPSILON, 1 + EPSILON) * advantages)
    return -(gain * scored).sum() / scored.sum()


def gradient(model: Any, loss: torch.Tensor) -> torch.Tensor:
    """[parameters] fp64."""
    parts = torch.autograd.grad(loss, list(model.parameters()))
    return torch.cat([p.double().reshape(-1) for p in parts])


def run(contender: str, seed: int, steps: int) -> dict[str, list[Any]]:
    """Curves of one run: reward and loss a step; every ERROR_EVERY steps the gradient error of the detached one, None
    where the exact gradient is 0 because all completions of each group earned the same.
    """
    model = build(seed)
    optimizer = torch.optim.Adam(model.parameters(), LEARNING_RATE)
    generator = torch.Generator().manual_seed(seed)
    curves: dict[str, list[Any]] = {"reward": [], "loss": [], "gradient_error": []}
    scored = torch.arange(PROMPT + COMPLETION).expand(PROMPTS * GENERATIONS, -1) >= PROMPT
    with open_store(device="64MiB") as store:
        kind = "detached" if contender == "detached" else "exact"
        replay = BranchReplay(model, store, min_shared_tokens=PROMPT // 2, prefix_gradient=kind)

        def score(rows: torch.Tensor) -> torch.Tensor:
            if contender == "dense":
                return dense_logprobs(model, rows, scored)
            return replay.logprobs(rows, None, scored)

        for step in range(steps):
            if step % ITERATIONS == 0:
                rows, rewards = sample(model, generator)
                with torch.no_grad():
                    old = score(rows)
            if contender == "detached" and step % ERROR_EVERY == 0:
                whole = dense_logprobs(model, rows, scored)
                exact = gradient(model, loss_of(whole, whole.detach(), rewards, scored))
                mine = gradient(model, loss_of(score(rows), old, rewards, scored))
                size = float(exact.norm())
                curves["gradient_error"].append(float((mine - exact).norm()) / size if size else None)
            loss = loss_of(score(rows), old, rewards, scored)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            curves["reward"].append(float(rewards.mean()))
            curves["loss"].append(loss.item())
    return curves


def smooth(values: list[float], width: int) -> list[float]:
    """Mean of the last `width` values at each place."""
    return [sum(values[max(0, i - width + 1) : i + 1]) / min(width, i + 1) for i in range(len(values))]


def draw(runs: dict[str, list[dict[str, list[Any]]]], path: Path) -> None:
    """Reward, loss and gradient error over the steps; a thin line a seed."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 3.6), layout="constrained")
    for index, (contender, seeds) in enumerate(runs.items()):
        for n, curves in enumerate(seeds):
            label = contender if n == 0 else None
            left.plot(smooth(curves["reward"], 10), color=f"C{index}", lw=1, label=label)
            middle.plot(smooth(curves["loss"], 10), color=f"C{index}", lw=1)
            if curves["gradient_error"]:
                found = [
                    (i * ERROR_EVERY, e) for i, e in enumerate(curves["gradient_error"]) if e is not None
                ]
                right.plot(*zip(*found, strict=True), color=f"C{index}", lw=1)
    for axis, title in ((left, "reward"), (middle, "loss"), (right, "gradient error of detached, relative")):
        axis.set(xlabel="step", title=title)
    left.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Runs every contender and seed; writes the curves and their picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, default=Path("convergence.json"))
    parser.add_argument("--figure", type=Path, default=Path("convergence.png"))
    parser.add_argument("--quick", action="store_true", help="20 steps of one seed")
    arguments = parser.parse_args()
    steps, seeds = (20, 1) if arguments.quick else (300, 3)
    runs: dict[str, list[dict[str, list[Any]]]] = {c: [] for c in CONTENDERS}
    begin = time.perf_counter()
    for seed in range(seeds):
        for contender in CONTENDERS:
            runs[contender].append(run(contender, seed, steps))
            print(f"seed {seed} {contender}: reward {sum(runs[contender][-1]['reward'][-10:]) / 10:.3f}")
    last = {c: [sum(r["reward"][-20:]) / len(r["reward"][-20:]) for r in rs] for c, rs in runs.items()}
    errors = [e for r in runs["detached"] for e in r["gradient_error"] if e is not None]
    apart = [
        max(abs(e - d) for e, d in zip(one["reward"], other["reward"], strict=True))
        for one, other in zip(runs["exact"], runs["dense"], strict=True)
    ]
    result = {
        "machine": describe_machine(),
        "steps": steps,
        "seeds": seeds,
        "seconds": time.perf_counter() - begin,
        "final_reward": last,
        "exact_from_dense_reward_max": apart,
        "detached_gradient_error_mean": sum(errors) / len(errors),
        "detached_gradient_error_max": max(errors),
        "runs": runs,
    }
    arguments.json.write_text(json.dumps(result, indent=1))
    draw(runs, arguments.figure)


if __name__ == "__main__":
    main()
