"""The folders of the index. A process may end between any two steps, and the next one still finds every record.

root/index       LMDB, with an entry for every persistent record
root/index.old   set aside while one is made anew: until that is whole, this is what a reader has
root/index.new   being made; of no worth once its process has ended

Without root/index a writer makes it anew from the segments. So that name is given to a whole index only.
"""

from __future__ import annotations

import logging
import os
import shutil
from contextlib import suppress
from pathlib import Path

from tiercache.folders import io_error, sync_directory

_log = logging.getLogger(__name__)


def index_to_read(root: Path) -> Path:
    """Folder of the index that a reader should open: there may be none in it."""
    return root / "index" if os.path.lexists(root / "index") else root / "index.old"


def set_aside(root: Path) -> None:
    """Takes an index that cannot be trusted from its place, in one step. Raises TierIOError."""
    if not os.path.lexists(root / "index"):
        return  # an earlier process set it aside, and did not come to its end
    try:
        _remove(root / "index.old")
        (root / "index").rename(root / "index.old")
    except OSError as error:
        raise io_error(f"disk tier: setting {root / 'index'} aside", error) from error


def begin_anew(root: Path) -> Path:
    """Where an index is made from nothing; what lay in the index's place is set aside. Raises TierIOError."""
    set_aside(root)
    try:
        _remove(root / "index.new")
    except OSError as error:
        raise io_error(f"disk tier: removing {root / 'index.new'}", error) from error
    return root / "index.new"


def put_in_place(root: Path, *, sync: bool) -> None:
    """Gives the whole index its name, in one step; `sync`: that survives a power cut when this returns.

    Raises:
        TierIOError: it has no name yet, or `sync` failed: then a power cut may take it.
    """
    try:
        (root / "index.new").rename(root / "index")
        if sync:
            sync_directory(root)
    except OSError as error:
        raise io_error(f"disk tier: giving {root / 'index.new'} its name", error) from error


def remove_leftovers(root: Path) -> None:
    """Removes what an earlier process left beside the index that is in its place. What cannot go now stays for the
    next process: a reader may be in it.
    """
    for name in ("index.old", "index.new"):
        try:
            _remove(root / name)
        except OSError as error:
            _log.warning("disk tier: %s cannot be removed: %s", root / name, error)


def make_room(root: Path) -> None:
    """Gives the room of the index that was set aside to the one being made."""
    with suppress(OSError):
        _remove(root / "index.old")


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
