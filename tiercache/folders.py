"""Directories, and the operating system's errors as ours."""

from __future__ import annotations

import os
from pathlib import Path

from tiercache.errors import ConfigError, TierIOError


def make_directory(path: Path, mode: int = 0o700) -> None:
    """Makes `path` and its parents. Raises ConfigError for what is no directory, TierIOError otherwise."""
    try:
        path.mkdir(mode=mode, parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        remedy = "name a directory, not a file"
        raise ConfigError(f"disk tier: {path} is not a directory", remedy=remedy) from error
    except OSError as error:
        raise io_error(f"disk tier: making {path}", error) from error


def sync_directory(path: Path) -> None:
    """New, renamed and removed names in this directory survive a power cut when this returns."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def io_error(what: str, error: OSError, remedy: str | None = None) -> TierIOError:
    """TierIOError with the operating system's number."""
    made = TierIOError(what, got=error.strerror, remedy=remedy)
    made.errno = error.errno
    return made
