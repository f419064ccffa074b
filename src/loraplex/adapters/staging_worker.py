"""Staging worker: a process that reads users' files for the server, one request at a time.

It reads requests from stdin and writes replies to stdout: an 8-byte little-endian length and as
many bytes of msgpack; the bytes of a request's tensors follow it. Nothing is pickled. It ends with
stdin. This is the only code that opens a user's files: an adapter is read, parsed, checked and
hashed, and left as one content-addressed canonical adapter file in the state directory.
Run as python -m loraplex.adapters.staging_worker.
"""

import contextlib
import logging
import os
import struct
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

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
    digest,
    read_canonical,
    write_canonical,
)
from loraplex.adapters.durable_files import reporting_full_disk, storing
from loraplex.adapters.examination import examine
from loraplex.adapters.formats import trtllm
from loraplex.adapters.formats.inputs import (
    AdapterInput,
    RequestTensors,
    open_input,
    read_fitting_rows,
)
from loraplex.adapters.formats.patterns import call_when_slow
from loraplex.adapters.seen_files import SeenFiles, identities_of
from loraplex.adapters.sources.fetch import local_path
from loraplex.adapters.sources.reference import SourceKind, parse, shown_source
from loraplex.adapters.staged import StagedAdapter, StageReply, StageRequest
from loraplex.adapters.state_files import canonical_path
from loraplex.adapters.targets import source_of
from loraplex.core.byte_sizes import readable_bytes
from loraplex.core.errors import (
    AdapterMismatchError,
    InternalError,
    InvalidAdapterError,
    LoraplexError,
    passing_error,
)
from loraplex.core.log_lines import log_to_parent
from loraplex.core.process_group import leave_group, let_others_go_first

logger = logging.getLogger(__name__)

Buffer = bytes | bytearray | memoryview

_LENGTH = struct.Struct("<Q")
_MAX_REQUEST_BYTES = 16 << 20


def serve(requests: BinaryIO, replies: BinaryIO) -> None:
    """Write one reply to each request, until the requests end.

    A process that let others go first cannot take its turn back, so it ends after that request.
    """
    niceness, is_last = os.nice(0), False
    while not is_last and (request := _read(requests)) is not None:
        tensors = _read_tensors(requests, request)
        if tensors is None:
            return
        reply = reply_to(request, tensors)
        is_last = os.nice(0) > niceness
        body = msgspec.msgpack.encode(msgspec.structs.replace(reply, is_last=is_last))
        del tensors, reply
        replies.write(_LENGTH.pack(len(body)) + body)
        replies.flush()


def reply_to(request: StageRequest, tensors: Sequence[Buffer] = ()) -> StageReply:
    """Stage the adapter of a request; the reply contains its report or its error."""
    what = shown_source(request.path)
    try:
        with reporting_full_disk():
            return _fetched_reply(request, tensors)
    except LoraplexError as error:
        info = (passing_error(error) or error).to_info()
    except (MemoryError, RecursionError) as error:
        failed = InvalidAdapterError(f"{what} cannot be read: {type(error).__name__}")
        info = failed.to_info()
    except Exception as error:
        logger.exception("staging %s failed", what)
        of_server = passing_error(error) or InternalError(f"staging {what} failed: {error}")
        info = of_server.to_info()
    return StageReply(request_id=request.request_id, error=info)


def _fetched_reply(request: StageRequest, tensors: Sequence[Buffer]) -> StageReply:
    """Fetch the adapter if it is remote, then stage or examine it.

    Errors name the source: its client does not know the path of the server's copy.
    """
    started = time.perf_counter()
    place, shown = request.path, None
    if request.upload:
        place, shown = request.upload, request.path
    elif request.tensors is None:
        place = str(local_path(request.path, request.policy, Path(request.state_dir)))
        reference = parse(request.path)
        shown = None if reference.kind is SourceKind.LOCAL else str(reference)
    fetch_seconds = time.perf_counter() - started
    here = msgspec.structs.replace(request, path=place)
    try:
        if request.examines:
            return StageReply(request_id=request.request_id, examined=examine(here))
        staged = stage(here, tensors)
    except LoraplexError as error:
        if shown is None:
            raise
        raise type(error)(error.message.replace(place, shown), param=error.param) from error
    if shown is not None and not request.upload:
        seconds = {"fetch": fetch_seconds, **staged.seconds}
        staged = msgspec.structs.replace(staged, seconds=seconds)
    return StageReply(request_id=request.request_id, staged=staged)


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
    if request.tensors is None:
        source = open_input(request.path, request.limits)
    else:
        source = RequestTensors(*map(trtllm.request_tensor, request.tensors, tensors))
    seen, context = SeenFiles(state_dir), _context(request)
    contexts = (context, _context(request) + request.base_path)
    identities = identities_of(source.files)
    known_digest = None
    if source.files and not request.reads_again:
        known_digest = seen.digest(identities, *contexts)
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
        # LoRA that was never trained. Other kinds need the base to decide this.
        changes_nothing=all(
            row.kind is RowKind.LORA
            and row.tensors["b"].is_zero()
            and ("bias" not in row.tensors or row.tensors["bias"].is_zero())
            for row in rows
        ),
        end_tokens=source.end_tokens,
        warnings=warnings,
        was_known=was_known,
        seconds=watch.seconds,
    )


def _read(stream: BinaryIO) -> StageRequest | None:
    """Return the next request; None at the end."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    assert length <= _MAX_REQUEST_BYTES, length
    body = stream.read(length)
    return msgspec.msgpack.decode(body, type=StageRequest) if len(body) == length else None


def _read_tensors(stream: BinaryIO, request: StageRequest) -> list[bytes] | None:
    """Return the bytes of the request's tensors; None if the stream ends within them."""
    tensors = []
    for header in request.tensors or ():
        data = stream.read(header.num_bytes)
        if len(data) < header.num_bytes:
            return None
        tensors.append(data)
    return tensors


def main() -> None:
    """Serve stdin. Anything that prints to stdout goes to stderr instead, away from the replies."""
    leave_group()
    log_to_parent("info")
    call_when_slow(let_others_go_first)
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    with replies:
        serve(sys.stdin.buffer, replies)


if __name__ == "__main__":
    main()
