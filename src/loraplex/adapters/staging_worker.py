"""Staging worker: a process that reads users' files for the server, one request at a time.

It reads requests from stdin and writes replies to stdout: an 8-byte little-endian length and as
many bytes of msgpack; the bytes of a request's tensors follow it. Nothing is pickled. It ends with
stdin. This is the only code that opens a user's files: an adapter is read, parsed, checked and
hashed, and left as one content-addressed canonical adapter file in the state directory.
Run as python -m loraplex.adapters.staging_worker.
"""

import base64
import contextlib
import itertools
import logging
import os
import struct
import sys
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
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
from loraplex.adapters.base_copies import without_base_copies
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
from loraplex.adapters.seen_files import FileIdentity, SeenFiles, identities_of
from loraplex.adapters.sources.fetch import files_at, local_path
from loraplex.adapters.sources.reference import SourceKind, parse, shown_source
from loraplex.adapters.staged import UPLOAD, StagedAdapter, StageReply, StageRequest
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
from loraplex.core.version import __version__

logger = logging.getLogger(__name__)

Buffer = bytes | bytearray | memoryview

_LENGTH = struct.Struct("<Q")
_MAX_REQUEST_BYTES = 16 << 20


class _StagedNote(msgspec.Struct, frozen=True):
    """Note of files that were staged."""

    stored: tuple[FileIdentity, ...]
    """Identity of the canonical adapter file."""
    report: StagedAdapter


def serve(requests: BinaryIO, replies: BinaryIO) -> None:
    """Write one reply to each request, until the requests end.

    A process that let others go first cannot take its turn back, so it ends after that request.
    """
    niceness, is_last = os.nice(0), False
    while not is_last and (request := _read(requests)) is not None:
        reply = reply_to(*request)
        is_last = os.nice(0) > niceness
        body = msgspec.msgpack.encode(msgspec.structs.replace(reply, is_last=is_last))
        del request, reply
        replies.write(_LENGTH.pack(len(body)) + body)
        replies.flush()


def reply_to(request: StageRequest, tensors: Sequence[Buffer] = ()) -> StageReply:
    """Stage the adapter of a request; the reply contains its report or its error."""
    what = UPLOAD if request.upload else shown_source(request.path)
    try:
        with reporting_full_disk():
            return _fetched_reply(request, tensors)
    except LoraplexError as error:
        info = (passing_error(error) or error).to_info()
    except (MemoryError, RecursionError) as error:
        info = InvalidAdapterError(f"{what} cannot be read: {type(error).__name__}").to_info()
    except Exception as error:
        logger.exception("staging %s failed", what)
        failed = InternalError(f"staging {what} failed: {error}")
        info = (passing_error(error) or failed).to_info()
    return StageReply(request_id=request.request_id, error=info)


def _fetched_reply(request: StageRequest, tensors: Sequence[Buffer]) -> StageReply:
    """Fetch the adapter if it is remote, then stage or examine it.

    Errors name the source: its client does not know the path of the server's copy.
    """
    started = time.perf_counter()
    place, shown = request.path, None
    if request.upload:
        place, shown = request.upload, UPLOAD
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
        message = error.message
        if request.upload:  # a client knows its files by their names alone
            message = message.replace(f"{place}/", "")
        raise type(error)(message.replace(place, shown), param=error.param) from error
    if shown is not None and not request.upload:
        seconds = {"fetch": fetch_seconds, **staged.seconds}
        staged = msgspec.structs.replace(staged, seconds=seconds)
    return StageReply(request_id=request.request_id, staged=staged)


def stage(request: StageRequest, tensors: Sequence[Buffer] = ()) -> StagedAdapter:
    """Put an adapter into canonical form and check it against the base.

    `tensors` are the bytes of request.tensors, if the adapter came in a request. Raises
    InvalidAdapterError, AdapterMismatchError, AdapterTooLargeError, UnsupportedFeatureError,
    StorageFullError or StorageUnavailableError, and then leaves no file.
    """
    ends = {"": time.perf_counter()}
    state_dir, place = Path(request.state_dir), Path(request.path)
    seen = SeenFiles(state_dir)
    files = files_at(place) if request.tensors is None else []
    identities, context = identities_of(files), _context(request, files)
    found = None if request.reads_again else seen.find(identities, context)
    known = _known_report(state_dir, found)
    ends["look_up"] = time.perf_counter()
    if known is not None:
        return msgspec.structs.replace(known, was_known=True, seconds=_durations(ends))
    if request.tensors is None:
        source = open_input(request.path, request.limits)
    else:
        source = RequestTensors(*map(trtllm.request_tensor, request.tensors, tensors))
    with _naming_other_base(source, request):
        rows = read_fitting_rows(source, request.shapes, request.limits)
        ends["read"] = time.perf_counter()
        rows, copies = without_base_copies(rows, request.base_folder, request.shapes)
        warnings = (*_check(request, source, rows), *map(_left_out, copies))
        if request.pool_dtype:
            check_magnitudes(rows, request.pool_dtype)
    ends["check"] = time.perf_counter()
    adapter_digest = digest(rows)
    ends["hash"] = time.perf_counter()
    path = canonical_path(state_dir, adapter_digest)
    if not _is_stored(path, adapter_digest):
        with storing():
            write_canonical(rows, adapter_digest, path)
    if identities_of(files) != identities:
        raise InvalidAdapterError(f"{request.path} was changed while it was read; load it again")
    report = _report(request, source, rows, adapter_digest, path, warnings)
    if files:
        # Compressed, a note fits in one block of a disk: notes are never deleted.
        note = zlib.compress(msgspec.msgpack.encode(_StagedNote(identities_of([path]), report)))
        seen.remember(identities, base64.b85encode(note).decode(), context)
    ends["write"] = time.perf_counter()
    return msgspec.structs.replace(report, seconds=_durations(ends))


def _durations(ends: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of each stage. ends: when each one ended, after the start of the first."""
    names, times = list(ends)[1:], itertools.pairwise(ends.values())
    return {name: end - begin for name, (begin, end) in zip(names, times, strict=True)}


def _context(request: StageRequest, files: Sequence[Path]) -> str:
    """Return what the report of an adapter depends on in addition to the content of its files."""
    base = (request.base_model, request.base_path, request.base_check, request.shapes)
    fields = (*base, request.limits.max_ranks, request.pool_dtype, [file.name for file in files])
    form = (__version__, StagedAdapter.__struct_fields__)
    return msgspec.json.encode((*form, *fields)).decode()


def _known_report(state_dir: Path, found: str | None) -> StagedAdapter | None:
    """Return the report in a note, if the adapter is stored as it was then, in any folder."""
    if found is None:
        return None
    try:
        note = msgspec.msgpack.decode(zlib.decompress(base64.b85decode(found)), type=_StagedNote)
        path = canonical_path(state_dir, note.report.source.digest)
        is_same = identities_of([path]) == note.stored
    except (InvalidAdapterError, msgspec.MsgspecError, ValueError, zlib.error):
        return None
    source = msgspec.structs.replace(note.report.source, path=str(path))
    return msgspec.structs.replace(note.report, source=source) if is_same else None


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


def _is_stored(path: Path, adapter_digest: str) -> bool:
    """Whether a file of the state directory is the adapter's, whole."""
    try:
        return read_canonical(path).digest == adapter_digest
    except (InvalidAdapterError, OSError):
        return False


def _check(
    request: StageRequest, source: AdapterInput, rows: tuple[CanonicalRow, ...]
) -> tuple[str, ...]:
    """Return warnings. Raises if the adapter does not fit the base or the engine."""
    check_shapes(rows, request.shapes, request.limits.max_ranks)
    warnings = check_base_name(
        *(source.trained_on, request.base_model, request.base_check),
        request.shapes.stored_format,
        request.shapes.architecture,
    )
    warnings += source.warnings(rows, request.shapes)
    if request.pool_dtype:
        warnings += check_cast(rows, request.pool_dtype)
    return tuple(warnings)


def _report(
    request: StageRequest,
    source: AdapterInput,
    rows: tuple[CanonicalRow, ...],
    adapter_digest: str,
    path: Path,
    warnings: tuple[str, ...],
) -> StagedAdapter:
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
        prompts=source.prompts,
        trained_on=source.trained_on,
        warnings=warnings,
    )


def _read(stream: BinaryIO) -> tuple[StageRequest, list[bytes]] | None:
    """Return the next request and the bytes of its tensors; None if the stream ends before that."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    assert length <= _MAX_REQUEST_BYTES, length
    body = stream.read(length)
    if len(body) < length:
        return None
    request = msgspec.msgpack.decode(body, type=StageRequest)
    sizes = [header.num_bytes for header in request.tensors or ()]
    tensors = list(map(stream.read, sizes))
    return (request, tensors) if list(map(len, tensors)) == sizes else None


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
