"""Documents stay true: code blocks run, links lead somewhere, commands exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import tiercache.cli

ROOT = Path(__file__).parent.parent.parent
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))),
]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)

# what a page's code takes for granted
GIVEN = {
    "README.md": """
import tempfile, torch, tiercache
from transformers import LlamaConfig, LlamaForCausalLM
folder = tempfile.mkdtemp()
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
                                     num_attention_heads=2))
input_ids = torch.cat([torch.randint(64, (1, 300)).expand(3, -1), torch.randint(64, (3, 4))], dim=1)
attention_mask = torch.ones_like(input_ids)
scored = torch.arange(304).expand(3, -1) >= 300
advantages = torch.tensor([1.0, -1.0, 0.5])
"""
}
# what the libraries say about their own names
_QUIET = """
import warnings
warnings.simplefilter("ignore")
"""
_TINY = (
    _QUIET
    + """
import tempfile, torch
from transformers import LlamaConfig, LlamaForCausalLM
folder = tempfile.mkdtemp()
def build():
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
                                        num_attention_heads=2, eos_token_id=1))
model = build()
input_ids = torch.cat([torch.randint(64, (1, 300)).expand(3, -1), torch.randint(64, (3, 4))], dim=1)
attention_mask = torch.ones_like(input_ids)
scored = torch.arange(304).expand(3, -1) >= 300
advantages = torch.tensor([1.0, -1.0, 0.5])
optimizer = torch.optim.SGD(model.parameters(), 0.1)
batches = [(input_ids, attention_mask, scored)] * 2
"""
)
# accelerate keeps one state a process
_FRESH_ACCELERATE = """
from accelerate.state import AcceleratorState
AcceleratorState._reset_state(reset_partial_state=True)
"""
GIVEN |= {
    "docs/attach-trl.md": _TINY
    + """
import tiny_trl
saved = tiny_trl.save_model(__import__("pathlib").Path(tempfile.mkdtemp()))
model, tokenizer, reward = tiny_trl.load_model(saved), tiny_trl.tokenizer(), tiny_trl.reward
dataset, config = tiny_trl.prompts(), tiny_trl.grpo_config(saved, max_steps=1)
""",
    "docs/attach-transformers.md": _QUIET,
    "docs/attach-lightning.md": _QUIET,
    "docs/attach-accelerate.md": _QUIET + _FRESH_ACCELERATE,
    "docs/attach-distributed.md": _TINY
    + """
import os, socket
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": "0", "WORLD_SIZE": "1"}
""",
    "docs/attach-references.md": _TINY + "frozen = build().requires_grad_(False)\n",
    "docs/tune.md": """
import tempfile
from tiercache.policies import tune as tuner
folder = tempfile.mkdtemp()
all_policies, few = dict(tuner.GRID), {"lru": [{}], "sieve": [{}]}
tuner.GRID.clear()
tuner.GRID.update(few)  # compiling all of them takes longer than the page
""",
    "docs/watching.md": _TINY
    + """
class writer:
    seen = {}
    @classmethod
    def add_scalar(cls, tag, value, step):
        cls.seen[tag] = value
""",
}
AFTERWARDS = {
    "README.md": """
assert logps.shape == input_ids.shape and logps.dtype == torch.float32
assert all(parameter.grad.abs().max() > 0 for parameter in model.parameters())
store.close()
""",
    "docs/attach-trl.md": "assert trainer.step_report.num_rows == 8\n",
    "docs/tune.md": """
tuner.GRID.update(all_policies)
assert set(tuned.table) == {"device", "host"}
assert tuned.gain_s > 0
assert set(store.config.policy.values()) <= set(few)
""",
    "docs/profile.md": "assert seconds > 0\n",
    "docs/watching.md": """
assert saved > 0.5
assert writer.seen["tiercache/bytes_capacity/device"] == 8 << 20
import json
events = json.load(open(f"{folder}/step.json"))["traceEvents"]
visits = {event["name"].split()[0] for event in events if event.get("cat") == "compute"}
assert visits == {"capture", "score", "replay", "pop"}
""",
    "docs/attach-distributed.md": """
for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"):
    del os.environ[name]
assert all(parameter.grad.abs().max() > 0 for parameter in model.parameters())
""",
    "docs/attach-accelerate.md": _FRESH_ACCELERATE,
    "docs/attach-references.md": "assert reference.reused_tokens == 300\n",
}


def text_of(page: str) -> str:
    return (ROOT / page).read_text()


def run_blocks(page: str) -> int:
    """Runs the page's code with what it takes for granted; the number of its blocks that ran."""
    names: dict[str, Any] = {"__name__": "page"}
    blocks = BLOCK.findall(text_of(page))
    for source in (GIVEN.get(page, ""), *blocks, AFTERWARDS.get(page, "")):
        exec(compile(source, page, "exec", dont_inherit=True), names)
    return len(blocks)


@pytest.mark.parametrize("page", [page for page in PAGES if "```python" in text_of(page)])
def test_the_code_of_a_page_runs_from_top_to_bottom(page: str) -> None:
    assert run_blocks(page) == text_of(page).count("```python"), "a block is written so that it is not found"


@pytest.mark.parametrize("trainer", ["transformers", "lightning", "accelerate"])
def test_a_trainers_example_is_a_whole_script_of_at_most_40_lines(trainer: str) -> None:
    (script,) = BLOCK.findall(text_of(f"docs/attach-{trainer}.md"))
    assert len(script.splitlines()) <= 40
    assert "import torch" in script
    assert "open_store" in script


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files(page: str) -> None:
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", text_of(page))
    missing = [t for t in targets if "://" not in t and not ((ROOT / page).parent / t).exists()]
    assert missing == []


def test_the_readme_fits_its_page() -> None:
    assert len(text_of("README.md").splitlines()) <= 60


@pytest.mark.parametrize("page", PAGES)
def test_commands_that_a_page_names_are_ours(page: str) -> None:
    named = set(
        re.findall(
            r"\btiercache ([a-z]+)\b(?=[ `|])",
            "\n".join(re.findall(r"`[^`\n]+`|^    .*$", text_of(page), re.MULTILINE)),
        )
    )
    assert named <= set(tiercache.cli.COMMANDS)


def test_the_makefile_has_what_the_documents_promise() -> None:
    makefile = text_of("Makefile")
    promised = {
        target for page in PAGES for target in re.findall(r"^    make (\w+)", text_of(page), re.MULTILINE)
    }
    assert promised
    assert [target for target in promised if f"\n{target}:" not in makefile] == []
