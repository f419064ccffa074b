"""Staging, one adapter: read, understand, check, hash, write. Runs in the staging worker.

The only code that opens a user's files. It leaves one content-addressed normal file in the state
directory and says where it is.
"""

import time
from pathlib import Path

from loraplex.adapters.formats import peft, torch_bin
from loraplex.adapters.formats.peft_config import CONFIG_NAME, PeftConfig, read_config
from loraplex.adapters.normal import (
    NormalRow,
    digest,
    normal_path,
    read_normal,
    source_of,
    write_normal,
)
from loraplex.adapters.seen_files import SeenFiles, identities_of
from loraplex.adapters.staged import StagedAdapter, StageRequest, StagingLimits
from loraplex.adapters.tensor_file import RawTensor, read_tensors
from loraplex.core.errors import InvalidAdapterError


class Stopwatch:
    """Seconds per named stage, in the order of the stages."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, stage: str) -> None:
        now = time.perf_counter()
        self.seconds[stage] = now - self._last
        self._last = now


def stage(request: StageRequest) -> StagedAdapter:
    """Put a PEFT folder into normal form and check it against the base.

    Raises InvalidAdapterError, AdapterMismatchError, AdapterTooLargeError or
    UnsupportedFeatureError; then no file is left behind.
    """
    watch = Stopwatch()
    state_dir = Path(request.state_dir)
    folder = _folder(request.path)
    config = read_config(folder, request.limits.max_header_bytes)
    weights = _weights_file(folder)
    seen, files = SeenFiles(state_dir), (folder / CONFIG_NAME, weights)
    identities = identities_of(files)
    known_digest = seen.digest(identities)
    rows = None if known_digest is None else _known_rows(state_dir, known_digest)
    watch.lap("look_up")
    if known_digest is not None and rows is not None:
        peft.check_against_base(rows, request.shapes, request.limits.max_rank)
        watch.lap("check")
        return _staged(request, config, rows, known_digest, watch, was_known=True)
    rows = peft.normal_rows(config, _read_weights(weights, request.limits))
    watch.lap("read")
    peft.check_against_base(rows, request.shapes, request.limits.max_rank)
    watch.lap("check")
    new_digest = digest(rows)
    watch.lap("hash")
    if _known_rows(state_dir, new_digest) is None:
        write_normal(rows, new_digest, normal_path(state_dir, new_digest))
    if identities_of(files) != identities:
        raise InvalidAdapterError(f"{folder} was changed while it was read; load it again")
    seen.remember(identities, new_digest)
    watch.lap("write")
    return _staged(request, config, rows, new_digest, watch, was_known=False)


def _folder(path: str) -> Path:
    """The folder itself, behind links. Raises InvalidAdapterError."""
    if not path or "\0" in path:
        raise InvalidAdapterError("the path of an adapter must be the path of a folder")
    try:
        folder = Path(path).expanduser().resolve(strict=True)
    except (OSError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise InvalidAdapterError(f"cannot open the adapter folder {path}: {reason}") from error
    if not folder.is_dir():
        raise InvalidAdapterError(f"{path} is not a folder; a PEFT adapter is one")
    return folder


def _weights_file(folder: Path) -> Path:
    for name in (peft.WEIGHTS_NAME, peft.TORCH_WEIGHTS_NAME):
        if (folder / name).exists():
            return folder / name
    raise InvalidAdapterError(
        f"{folder} has neither {peft.WEIGHTS_NAME} nor {peft.TORCH_WEIGHTS_NAME}"
    )


def _read_weights(path: Path, limits: StagingLimits) -> dict[str, RawTensor]:
    if path.name == peft.TORCH_WEIGHTS_NAME:
        return torch_bin.read_torch_file(
            path, max_file_bytes=limits.max_file_bytes, max_tensors=limits.max_tensors
        )
    return read_tensors(
        path,
        max_file_bytes=limits.max_file_bytes,
        max_header_bytes=limits.max_header_bytes,
        max_tensors=limits.max_tensors,
    ).tensors


def _known_rows(state_dir: Path, known_digest: str) -> tuple[NormalRow, ...] | None:
    """The rows of an adapter that is in the state directory, whole; None if it is not."""
    try:
        content = read_normal(normal_path(state_dir, known_digest))
    except (InvalidAdapterError, OSError):
        return None
    return content.rows if content.digest == known_digest else None


def _staged(
    request: StageRequest,
    config: PeftConfig,
    rows: tuple[NormalRow, ...],
    adapter_digest: str,
    watch: Stopwatch,
    *,
    was_known: bool,
) -> StagedAdapter:
    path = normal_path(Path(request.state_dir), adapter_digest)
    tensors = [tensor for row in rows for tensor in row.tensors.values()]
    return StagedAdapter(
        source=source_of(adapter_digest, path, rows),
        dtypes=tuple(sorted({tensor.dtype for tensor in tensors})),
        num_tensors=len(tensors),
        changes_nothing=all(row.tensors["b"].is_zero() for row in rows),
        warnings=tuple(_warnings(request, config, rows)),
        was_known=was_known,
        seconds=watch.seconds,
    )


def _warnings(request: StageRequest, config: PeftConfig, rows: tuple[NormalRow, ...]) -> list[str]:
    warnings = []
    trained_on = config.base_model_name_or_path
    if trained_on and request.base_model and _short(trained_on) != _short(request.base_model):
        warnings.append(
            f"it says that it was trained on {trained_on!r}; this server runs "
            f"{request.base_model!r}"
        )
    missing = peft.missing_modules(config, rows)
    if missing:
        warnings.append(f"target_modules names {', '.join(missing)}, but it has no such tensors")
    return warnings


def _short(model: str) -> str:
    """The last part of a hub id or a path: all that two machines share."""
    return model.rstrip("/").rpartition("/")[2].casefold()
