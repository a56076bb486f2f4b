"""What a demo runs on: the options of the command line, validated once."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from tiercache.config import parse_size
from tiercache.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class DemoSettings:
    """Options of one demo; both sides get the same.

    Attributes:
        model: folder or name of a Transformers causal LM; None for a small Llama made in memory.
        gguf: GGUF file with the weights of one.
        prompt_tokens: length of the shared prompt.
        branches: rows of the group.
        tail_tokens: scored tokens of each row, after the prompt.
        device_budget: budget of the store's device tier, like "8MiB".
        host_budget: budget of the store's host tier.
        disk: folder of the disk tier.
        disk_capacity: budget of the disk tier.
    """

    model: str | None = None
    gguf: str | None = None
    prompt_tokens: int
    branches: int
    tail_tokens: int
    device_budget: str
    host_budget: str
    disk: str
    disk_capacity: str = "8GiB"

    def __post_init__(self) -> None:
        if self.model is not None and self.gguf is not None:
            raise ConfigError("--model and --gguf", got="both", remedy="name one of them")
        if self.gguf is not None and not Path(self.gguf).is_file():
            raise ConfigError("--gguf", got=self.gguf, limit="a file that exists")
        for name, least in (("prompt_tokens", 2), ("branches", 1), ("tail_tokens", 1)):
            if getattr(self, name) < least:
                raise ConfigError(_option(name), got=getattr(self, name), limit=f"at least {least}")
        if Path(self.disk).exists() and not Path(self.disk).is_dir():
            raise ConfigError("--disk", got=self.disk, limit="a folder")
        for name in ("device_budget", "host_budget"):
            parse_size(getattr(self, name), _option(name))

    @property
    def row_tokens(self) -> int:
        """Tokens of one row."""
        return self.prompt_tokens + self.tail_tokens

    def to_json(self) -> str:
        """The settings as one line, for the processes of the two sides."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> DemoSettings:
        """The settings that `to_json` wrote."""
        return cls(**json.loads(text))


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
