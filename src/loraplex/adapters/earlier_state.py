"""Takes over the adapters of an earlier version, which kept those of all models in one folder."""

import contextlib
import errno
import logging
import os
import shutil
import sqlite3
from pathlib import Path

from loraplex.adapters.database import DATABASE_NAME
from loraplex.adapters.durable_files import make_folder, sync_folder
from loraplex.adapters.state_files import StateLock, canonical_entries
from loraplex.core.counts import counted
from loraplex.core.errors import ConfigError

logger = logging.getLogger(__name__)


def adopt_state(earlier: Path, state_dir: Path) -> None:
    """Copy names, versions and files of `earlier` to a state directory that has none yet.

    Each model's state gets all of them, and `earlier` stays as it is, so nothing is lost. Files
    are linked, and take no more space. Raises ConfigError if another server uses a folder.
    """
    if (state_dir / DATABASE_NAME).exists() or not (earlier / DATABASE_NAME).exists():
        return
    with contextlib.ExitStack() as locks:
        for folder in (state_dir, earlier):
            locks.callback(StateLock.own(folder).close)
        locks.callback(StateLock.use_files(earlier).close)
        try:
            num_files = _link_files(earlier, state_dir)
            _copy_database(earlier / DATABASE_NAME, state_dir / DATABASE_NAME)
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(
                f"cannot take over the adapters in {earlier}, where earlier versions kept those of "
                f"all models: {error}. Correct this, or set --state-dir"
            ) from error
    logger.info(
        "took over %s from %s, where earlier versions kept the adapters of all models; "
        "`loraplex cache clean --with-state` removes that folder",
        *(counted(num_files, "adapter file"), earlier),
    )


def _link_files(earlier: Path, state_dir: Path) -> int:
    num_files = 0
    for entry in canonical_entries(earlier):
        target = state_dir / Path(entry.path).relative_to(earlier)
        make_folder(target.parent)
        with contextlib.suppress(FileExistsError):
            try:
                os.link(entry.path, target)
            except OSError as error:
                if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP):
                    raise
                draft = target.with_name(f".{target.name}.new")
                shutil.copy2(entry.path, draft)
                draft.rename(target)
        sync_folder(target.parent)
        num_files += 1
    return num_files


def _copy_database(source: Path, target: Path) -> None:
    """Copy it whole or not at all: an interrupted copy is made again."""
    draft = target.with_name(f".{target.name}.new")
    draft.unlink(missing_ok=True)
    with (
        contextlib.closing(sqlite3.connect(source)) as earlier,
        contextlib.closing(sqlite3.connect(draft)) as copy,
    ):
        earlier.backup(copy)
    draft.rename(target)
    sync_folder(target.parent)
