"""Staging of one adapter: read, parse, check, hash, write. Runs in the staging worker.

This is the only code that opens a user's files. It leaves one content-addressed canonical adapter
file in the state directory and returns its path.
"""

import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from loraplex.adapters.base_check import (
    check_base_name,
    check_cast,
    check_magnitudes,
    check_shapes,
    other_base,
)
from loraplex.adapters.base_copies import is_base_copy, without_base_copies
from loraplex.adapters.canonical import (
    CanonicalRow,
    RowKind,
    canonical_path,
    digest,
    read_canonical,
    write_canonical,
)
from loraplex.adapters.durable_files import storing
from loraplex.adapters.formats import trtllm
from loraplex.adapters.formats.inputs import (
    AdapterInput,
    RequestTensors,
    open_input,
    read_fitting_rows,
)
from loraplex.adapters.seen_files import FileIdentity, SeenFiles, identities_of
from loraplex.adapters.staged import StagedAdapter, StageRequest
from loraplex.adapters.targets import source_of
from loraplex.core.byte_sizes import readable_bytes
from loraplex.core.errors import AdapterMismatchError, InvalidAdapterError

Buffer = bytes | bytearray | memoryview


class Stopwatch:
    """Stopwatch with the seconds of each named stage, in order."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, stage: str) -> None:
        now = time.perf_counter()
        self.seconds[stage] = now - self._last
        self._last = now


def stage(request: StageRequest, tensors: Sequence[Buffer] = ()) -> StagedAdapter:
    """Put an adapter into canonical form and check it against the base.

    `tensors` are the bytes of request.tensors, if the adapter came in a request. Raises
    InvalidAdapterError, AdapterMismatchError, AdapterTooLargeError, UnsupportedFeatureError,
    StorageFullError or StorageUnavailableError, and then leaves no file.
    """
    watch = Stopwatch()
    state_dir = Path(request.state_dir)
    source = _input(request, tensors)
    seen, context = SeenFiles(state_dir), _context(request)
    contexts = (context, _context(request) + request.base_path)
    identities = identities_of(source.files)
    known_digest = _seen_digest(request, seen, identities, contexts) if source.files else None
    rows = None if known_digest is None else _known_rows(state_dir, known_digest)
    watch.lap("look_up")
    if known_digest is not None and rows is not None:
        warnings = _check(request, source, rows)
        watch.lap("check")
        return _staged(request, source, rows, known_digest, warnings, watch, was_known=True)
    with _naming_other_base(source, request):
        rows = read_fitting_rows(source, request.shapes, request.limits)
        watch.lap("read")
        if request.base_path and any(map(is_base_copy, rows)):
            context = contexts[1]
        rows, copies = without_base_copies(rows, request.base_folder, request.shapes)
        warnings = _check(request, source, rows)
        warnings += tuple(map(_left_out, copies))
        if request.pool_dtype:
            check_magnitudes(rows, request.pool_dtype)
    watch.lap("check")
    new_digest = digest(rows)
    watch.lap("hash")
    if _known_rows(state_dir, new_digest) is None:
        with storing():
            write_canonical(rows, new_digest, canonical_path(state_dir, new_digest))
    if identities_of(source.files) != identities:
        raise InvalidAdapterError(f"{request.path} was changed while it was read; load it again")
    if source.files and not source.left_out:  # what is left out is reported at each load
        seen.remember(identities, new_digest, context)
    watch.lap("write")
    return _staged(request, source, rows, new_digest, warnings, watch, was_known=False)


def _seen_digest(
    request: StageRequest,
    seen: SeenFiles,
    identities: tuple[FileIdentity, ...],
    contexts: tuple[str, ...],
) -> str | None:
    """Return the digest of unchanged files that were staged before."""
    if request.reads_again:
        return None
    found = (seen.digest(identities, context) for context in contexts)
    return next((known for known in found if known is not None), None)


@contextlib.contextmanager
def _naming_other_base(source: AdapterInput, request: StageRequest) -> Iterator[None]:
    """Add to an error about a shape that the adapter names another base model."""
    try:
        yield
    except AdapterMismatchError as error:
        stored = request.shapes.stored_format
        other = other_base(source.trained_on, request.base_model, stored)
        if other is None or other in error.message:
            raise
        raise AdapterMismatchError(
            f"the adapter belongs to another base model: {other} ({error.message})"
        ) from error


def _left_out(copy: CanonicalRow) -> str:
    return (
        f"{copy.origin}: its copy of the base model's own weight "
        f"({readable_bytes(copy.num_bytes)}, the same values) is left out"
    )


def _input(request: StageRequest, tensors: Sequence[Buffer]) -> AdapterInput:
    if request.tensors is None:
        return open_input(request.path, request.limits)
    weights, config = (
        trtllm.request_tensor(header, data)
        for header, data in zip(request.tensors, tensors, strict=True)
    )
    return RequestTensors(weights, config)


def _context(request: StageRequest) -> str:
    """Return what the rows, and their checks, depend on in addition to the files."""
    fields = (request.shapes, request.limits.max_ranks, request.pool_dtype)
    return msgspec.json.encode(fields).decode()


def _known_rows(state_dir: Path, known_digest: str) -> tuple[CanonicalRow, ...] | None:
    """Return the rows of an adapter in the state directory; None if it is absent or damaged."""
    try:
        content = read_canonical(canonical_path(state_dir, known_digest))
    except (InvalidAdapterError, OSError):
        return None
    return content.rows if content.digest == known_digest else None


def _check(
    request: StageRequest, source: AdapterInput, rows: tuple[CanonicalRow, ...]
) -> tuple[str, ...]:
    """Return warnings. Raises if the adapter does not fit the base or the engine."""
    check_shapes(rows, request.shapes, request.limits.max_ranks)
    warnings = check_base_name(
        source.trained_on, request.base_model, request.base_check, request.shapes.stored_format
    )
    warnings += source.warnings(rows, request.shapes)
    if request.pool_dtype:
        warnings += check_cast(rows, request.pool_dtype)
    return tuple(warnings)


def _staged(
    request: StageRequest,
    source: AdapterInput,
    rows: tuple[CanonicalRow, ...],
    adapter_digest: str,
    warnings: tuple[str, ...],
    watch: Stopwatch,
    *,
    was_known: bool,
) -> StagedAdapter:
    path = canonical_path(Path(request.state_dir), adapter_digest)
    tensors = [tensor for row in rows for tensor in row.tensors.values()]
    return StagedAdapter(
        source=source_of(adapter_digest, path, rows, request.shapes, request.limits.max_ranks),
        dtypes=tuple(sorted({tensor.dtype for tensor in tensors if tensor.is_float})),
        num_tensors=len(tensors),
        changes_nothing=all(_changes_nothing(row) for row in rows),
        end_tokens=source.end_tokens,
        warnings=warnings,
        was_known=was_known,
        seconds=watch.seconds,
    )


def _changes_nothing(row: CanonicalRow) -> bool:
    """Whether a row is LoRA that was never trained. Other kinds need the base to decide this."""
    bias = row.tensors.get("bias")
    is_silent = bias is None or bias.is_zero()
    return row.kind is RowKind.LORA and is_silent and row.tensors["b"].is_zero()
