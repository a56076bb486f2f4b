"""Options of a store in a file, as `tiercache tune` writes it and a person may edit it."""

from __future__ import annotations

import dataclasses
import json
import tomllib
from pathlib import Path
from typing import Any

from tiercache.config import StoreConfig
from tiercache.errors import ConfigError


def read_options(path: str | Path) -> dict[str, Any]:
    """Fields of `StoreConfig` from a TOML or (by its suffix) JSON file.

    Raises:
        ConfigError: the file cannot be read, or names an option that a store does not have.
    """
    path = Path(path)
    try:
        text = path.read_text()
        told = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (OSError, ValueError) as error:
        raise ConfigError(f"config {path}: cannot be read", got=error) from error
    if not isinstance(told, dict):
        raise ConfigError(f"config {path}: no table of options", got=type(told).__name__)
    known = {field.name for field in dataclasses.fields(StoreConfig) if field.init}
    unknown = sorted(set(told) - known)
    if unknown:
        raise ConfigError(
            f"config {path}: unknown options", got=", ".join(unknown), limit=", ".join(sorted(known))
        )
    if "namespace" in told:
        told["namespace"] = str(told["namespace"]).encode()
    return told
