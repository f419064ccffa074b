"""Staging worker: a process that reads users' files for the server, one request at a time.

It reads requests from stdin and writes replies to stdout: an 8-byte little-endian length and as
many bytes of msgpack; the bytes of a request's tensors follow it. Nothing is pickled. It ends with
stdin.
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

from loraplex.adapters.durable_files import reporting_full_disk
from loraplex.adapters.examination import examine
from loraplex.adapters.formats.patterns import call_when_slow
from loraplex.adapters.sources.fetch import local_path
from loraplex.adapters.sources.reference import SourceKind, parse, shown_source
from loraplex.adapters.stage import stage
from loraplex.adapters.staged import Examination, StagedAdapter, StageReply, StageRequest
from loraplex.core.errors import (
    InternalError,
    InvalidAdapterError,
    LoraplexError,
    passing_error,
)
from loraplex.core.log_lines import log_to_parent
from loraplex.core.process_group import leave_group, let_others_go_first

logger = logging.getLogger(__name__)

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


def reply_to(request: StageRequest, tensors: Sequence[bytes] = ()) -> StageReply:
    """Stage the adapter of a request; the reply contains its report or its error."""
    what = shown_source(request.path)
    try:
        with reporting_full_disk():
            if request.examines:
                return StageReply(request_id=request.request_id, examined=_examined(request))
            return StageReply(request_id=request.request_id, staged=_staged(request, tensors))
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


def _staged(request: StageRequest, tensors: Sequence[bytes]) -> StagedAdapter:
    """Fetch the adapter if it is remote, and stage it."""
    if request.tensors is not None:
        return stage(request, tensors)
    started = time.perf_counter()
    place, shown = _place(request)
    fetched = time.perf_counter() - started
    with _naming(place, shown):
        staged = stage(msgspec.structs.replace(request, path=place))
    if shown is None or request.upload:
        return staged
    return msgspec.structs.replace(staged, seconds={"fetch": fetched, **staged.seconds})


def _examined(request: StageRequest) -> Examination:
    place, shown = _place(request)
    with _naming(place, shown):
        return examine(msgspec.structs.replace(request, path=place))


def _place(request: StageRequest) -> tuple[str, str | None]:
    """Return an adapter's path, and its source if the path is the server's own copy of it."""
    if request.upload:
        return request.upload, request.path
    place = str(local_path(request.path, request.policy, Path(request.state_dir)))
    reference = parse(request.path)
    return place, None if reference.kind is SourceKind.LOCAL else str(reference)


@contextlib.contextmanager
def _naming(place: str, shown: str | None) -> Iterator[None]:
    """Name the source in errors: its client does not know the path of the server's copy."""
    try:
        yield
    except LoraplexError as error:
        if shown is None:
            raise
        raise type(error)(error.message.replace(place, shown), param=error.param) from error


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
