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
_TINY = """
import tempfile, warnings, torch
warnings.simplefilter("ignore")  # of the libraries, about their own names
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
    "docs/attach-transformers.md": _TINY
    + """
from transformers import TrainingArguments
dataset = [{"input_ids": row, "labels": row} for row in input_ids[:, :20]]
args = TrainingArguments(output_dir=folder, use_cpu=True, report_to="none", save_strategy="no", max_steps=1,
                         disable_tqdm=True)
""",
    "docs/attach-accelerate.md": _TINY + _FRESH_ACCELERATE,
    "docs/attach-lightning.md": _TINY
    + """
import lightning
class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(8, 1)
    def training_step(self, batch, index):
        return self.net(batch).pow(2).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)
module, loader = Module(), torch.utils.data.DataLoader(torch.randn(4, 8), batch_size=2)
quiet = {"default_root_dir": folder, "accelerator": "cpu", "logger": False, "enable_checkpointing": False,
         "enable_progress_bar": False, "enable_model_summary": False}
""",
    "docs/attach-distributed.md": _TINY
    + """
import os, socket
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": "0", "WORLD_SIZE": "1"}
""",
    "docs/attach-references.md": _TINY + "frozen = build().requires_grad_(False)\n",
}
AFTERWARDS = {
    "README.md": """
assert logps.shape == input_ids.shape and logps.dtype == torch.float32
assert all(parameter.grad.abs().max() > 0 for parameter in model.parameters())
store.close()
""",
    "docs/attach-trl.md": "assert trainer.step_report.num_rows == 8\n",
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
