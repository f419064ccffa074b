"""Fetches an adapter by its reference to files on this machine. Runs in the staging worker.

Fetched files are kept in the state directory, so that an unchanged source is not fetched again:

    sources/KEY/note.json        the files that arrived, and the tags by which changes are found
    sources/KEY/CONTENT/         the files; the folder is named by their content
    sources/.arriving-*/         files that are arriving

A folder appears under its name only when it is complete.
"""

import contextlib
import hashlib
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from loraplex.adapters.durable_files import storing, write_atomically
from loraplex.adapters.formats import mlx, peft, trtllm
from loraplex.adapters.formats.peft_config import CONFIG_NAME
from loraplex.adapters.formats.peft_ends import END_FILES
from loraplex.adapters.sources.download import Allowance, Arrived, Missing
from loraplex.adapters.sources.policy import SourcePolicy, checked_path
from loraplex.adapters.sources.reference import (
    FILE_SUFFIXES,
    GGUF_SUFFIX,
    Reference,
    SourceKind,
    gguf_files_of,
    parse,
)
from loraplex.core.errors import AdapterLoadError, InvalidAdapterError

if TYPE_CHECKING:
    from loraplex.adapters.sources.remotes import Remote

logger = logging.getLogger(__name__)

FOLDERS = (
    ((CONFIG_NAME,), (*peft.WEIGHTS_NAMES, mlx.WEIGHTS_NAME)),
    ((trtllm.WEIGHTS_NAME,), trtllm.CONFIG_NAMES),
)
"""Files of an adapter in a folder: of each group, the first that exists."""
WEIGHTS_NAMES = frozenset((*peft.WEIGHTS_NAMES, mlx.WEIGHTS_NAME, trtllm.WEIGHTS_NAME))
FILE_NAMES = (
    *(name for groups in FOLDERS for group in groups for name in group),
    *END_FILES,
)
"""Files that a folder may have."""
SINGLE_NAMES = tuple(f"adapter{suffix}" for suffix in FILE_SUFFIXES)
"""Names at the server of single files, which may have any name at their source."""

_NOTE_NAME = "note.json"
_ARRIVING = ".arriving-"
_ABANDONED_SECONDS = 3600.0


class _FetchNote(msgspec.Struct, frozen=True):
    content: str
    """Name of the folder with the files."""
    files: dict[str, Arrived]


def files_at(place: Path) -> list[Path]:
    """Return the files that an adapter at a place may be read from, without those that are missing.

    Raises OSError.
    """
    if not os.path.isdir(place):
        return [place] if os.path.exists(place) else []
    named = filter(os.path.exists, (place / name for name in FILE_NAMES))
    return [*named, *gguf_files_of(place)]


def local_path(text: str, policy: SourcePolicy, state_dir: Path) -> Path:
    """Return an adapter's folder or file on this machine, fetched if it is remote.

    Raises InvalidAdapterError, PermissionDeniedError, AdapterTooLargeError,
    UnsupportedFeatureError, or AdapterLoadError, StorageFullError or
    StorageUnavailableError if it may succeed later.
    """
    reference = parse(text)
    if reference.kind is SourceKind.LOCAL:
        return checked_path(reference.location, policy, FILE_NAMES)
    return _fetched(reference, policy, state_dir / "sources")


def _fetched(reference: Reference, policy: SourcePolicy, folder: Path) -> Path:
    """Return the adapter as its source has it now.

    folder: of all fetched adapters, which several processes may use.
    """
    # An HTTP client is half of what a staging worker imports, and most sources are local.
    from loraplex.adapters.sources.remotes import open_remote  # noqa: PLC0415

    remote = open_remote(reference, policy)
    home = folder / _key(reference)
    kept = _kept(home)
    started = time.monotonic()
    try:
        with _arriving(folder) as arriving:
            arrival = _Download(remote, arriving, Allowance(policy, str(reference)), kept)
            arrival.get_all(reference)
            _check_sum(reference, arrival.files)
            note = _FetchNote(_content_of(arrival.files), arrival.files)
            if kept is None or kept.content != note.content:
                with storing():
                    arrival.take_unchanged(home)
                    _move(arriving, home / note.content)
    except AdapterLoadError as error:
        if kept is None or not policy.may_use_kept:
            raise
        _check_sum(reference, kept.files)
        logger.warning("%s; the copy that arrived before is used", error.message)
        note = kept
    else:
        with storing():
            _write_note(home, note)
        _forget_others(home, note.content)
    if kept is None or kept.content != note.content:
        num_bytes = sum(file.num_bytes for file in note.files.values())
        seconds = time.monotonic() - started
        logger.info("fetched %s: %.1f MiB in %.1f s", reference, num_bytes / 2**20, seconds)
    _trim(folder, policy.max_kept_bytes, home)
    place = home / note.content
    return place / f"adapter{reference.file_suffix}" if reference.file_suffix else place


def _write_note(home: Path, note: _FetchNote) -> None:
    try:
        write_atomically(home / _NOTE_NAME, [msgspec.json.encode(note)])
    except OSError:
        # Files without a note would stay for ever: `_trim` finds adapters by their notes.
        if not (home / _NOTE_NAME).exists():
            shutil.rmtree(home, ignore_errors=True)
        raise


@contextlib.contextmanager
def _arriving(root: Path) -> Iterator[Path]:
    """Yield a folder which is deleted afterwards, unless it was moved away."""
    with storing():
        root.mkdir(parents=True, exist_ok=True)
    for old in root.glob(f"{_ARRIVING}*"):
        with contextlib.suppress(OSError):
            if time.time() - old.stat().st_mtime > _ABANDONED_SECONDS:
                shutil.rmtree(old)
    with storing():
        folder = Path(tempfile.mkdtemp(prefix=_ARRIVING, dir=root))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _trim(root: Path, max_bytes: int, used_now: Path) -> None:
    """Delete the least recently used adapters until the rest fits."""
    homes = []
    for note in root.glob(f"*/{_NOTE_NAME}"):
        with contextlib.suppress(OSError):
            size = sum(file.stat().st_size for file in note.parent.glob("*/*"))
            homes.append((note.stat().st_mtime, size, note.parent))
    total = sum(size for _, size, _ in homes)
    for _, size, home in sorted(homes):
        if total <= max_bytes:
            return
        if home != used_now:
            shutil.rmtree(home, ignore_errors=True)
            total -= size


class _Download:
    """Downloads of one adapter's files, one after the other."""

    def __init__(
        self, remote: "Remote", folder: Path, allowance: Allowance, kept: _FetchNote | None
    ) -> None:
        self.files: dict[str, Arrived] = {}
        self._remote = remote
        self._folder = folder
        self._allowance = allowance
        self._kept = kept
        self._unchanged: list[str] = []

    def get_all(self, reference: Reference) -> None:
        """Download all files. Raises InvalidAdapterError if the source has no complete adapter."""
        if reference.file_suffix:
            if not self._get("", f"adapter{reference.file_suffix}"):
                raise InvalidAdapterError(f"there is no {reference}", param="path")
            return
        for first, *others in FOLDERS:
            if not self._get_first(first):
                continue
            for group in others:
                if not self._get_first(group):
                    raise InvalidAdapterError(
                        f"{reference} has {first[0]}, but neither {' nor '.join(group)}",
                        param="path",
                    )
            if first[0] == CONFIG_NAME:
                self._get_end_files(reference)
            return
        tried = " nor ".join(first[0] for first, *_ in FOLDERS)
        raise InvalidAdapterError(
            f"{reference} holds no adapter: neither {tried}; a GGUF file is named, such as "
            f"{reference}/FILE{GGUF_SUFFIX}",
            param="path",
        )

    def take_unchanged(self, home: Path) -> None:
        """Link the files that have not changed into the folder of those that have."""
        for name in self._unchanged:
            assert self._kept is not None
            os.link(home / self._kept.content / name, self._folder / name)

    def _get_end_files(self, reference: Reference) -> None:
        """Download the files with end tokens that a PEFT folder has."""
        for name in END_FILES:
            try:
                self._get(name, name)
            except InvalidAdapterError as error:
                # Object stores refuse what they do not have to clients that may not list it.
                logger.info("%s: %s is left out: %s", reference, name, error.message)

    def _get_first(self, names: Sequence[str]) -> bool:
        return any(self._get(name, name) for name in names)

    def _get(self, remote_name: str, name: str) -> bool:
        """Download a file, if it has changed; return whether the source has it."""
        known = None if self._kept is None else self._kept.files.get(name)
        target = self._folder / name
        got = self._remote.get(remote_name, target, self._allowance, known.tag if known else "")
        if isinstance(got, Arrived):
            self.files[name] = got
        elif got is Missing.UNCHANGED:
            assert known is not None
            self._allowance.spend(known.num_bytes)
            self._unchanged.append(name)
            self.files[name] = known
        return name in self.files


def _kept(home: Path) -> _FetchNote | None:
    """Return the note of what arrived before, if all of it is still there."""
    try:
        note = msgspec.json.decode((home / _NOTE_NAME).read_bytes(), type=_FetchNote)
        sizes = {name: (home / note.content / name).stat().st_size for name in note.files}
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return note if all(sizes[name] == file.num_bytes for name, file in note.files.items()) else None


def _move(arriving: Path, place: Path) -> None:
    """Give a complete folder its name, unless the same content is there already."""
    place.parent.mkdir(parents=True, exist_ok=True)
    try:
        arriving.rename(place)
    except OSError:
        if not place.is_dir():
            raise


def _forget_others(home: Path, content: str) -> None:
    for folder in home.iterdir():
        if folder.is_dir() and folder.name != content:
            shutil.rmtree(folder, ignore_errors=True)


def _check_sum(reference: Reference, files: dict[str, Arrived]) -> None:
    """Raise InvalidAdapterError if the weights have another checksum than the reference."""
    if reference.sha256 is None:
        return
    for name, file in files.items():
        if (name in SINGLE_NAMES or name in WEIGHTS_NAMES) and file.sha256 != reference.sha256:
            raise InvalidAdapterError(
                f"the SHA-256 of {reference} is {file.sha256}, not {reference.sha256} as requested",
                param="path",
            )


def _key(reference: Reference) -> str:
    parts = (reference.kind.name, reference.location, reference.revision, reference.folder)
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()[:32]


def _content_of(files: dict[str, Arrived]) -> str:
    parts = sorted((name, file.sha256) for name, file in files.items())
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()[:32]
