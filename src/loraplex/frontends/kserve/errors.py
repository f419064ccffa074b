"""How errors of core.errors look to a Triton client: one table for HTTP and gRPC.

Triton itself has eight codes and returns 400 for everything that is not internal, not found,
unavailable or unsupported; we keep that, and add 401, 403, 408, 413, 429 and 507, which it has no
code for.
"""

import logging
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from loraplex.core import errors
from loraplex.frontends.kserve.failures import FailedResponse
from loraplex.serving.wire_request import note_error

logger = logging.getLogger(__name__)


class Status(NamedTuple):
    http: int
    grpc: str
    """Name of the grpc.StatusCode."""


class NotFoundError(errors.RequestError):
    """What only this protocol knows by name is not there: a region of shared memory."""

    code = "not_found"


class AlreadyExistsError(errors.RequestError):
    """The name is taken."""

    code = "already_exists"


_INVALID = Status(400, "INVALID_ARGUMENT")
_NOT_FOUND = Status(404, "NOT_FOUND")
_UNAVAILABLE = Status(503, "UNAVAILABLE")
_INTERNAL = Status(500, "INTERNAL")

STATUS: Mapping[type[errors.LoraplexError], Status] = MappingProxyType(
    {
        errors.InvalidRequestError: _INVALID,
        errors.InvalidParameterError: _INVALID,
        errors.InvalidTensorError: _INVALID,
        errors.PromptTooLongError: _INVALID,
        errors.TokenOutOfVocabularyError: _INVALID,
        errors.PayloadTooLargeError: Status(413, "RESOURCE_EXHAUSTED"),
        errors.BodyTimeoutError: Status(408, "DEADLINE_EXCEEDED"),
        errors.ModelNotFoundError: _NOT_FOUND,
        errors.AdapterNotFoundError: _NOT_FOUND,
        errors.ResponseNotFoundError: _NOT_FOUND,
        errors.UploadNotFoundError: _NOT_FOUND,
        errors.AdapterExistsError: Status(400, "ALREADY_EXISTS"),
        errors.InvalidAdapterError: _INVALID,
        errors.AdapterMismatchError: _INVALID,
        errors.AdapterTooLargeError: _INVALID,
        errors.UnsupportedFeatureError: Status(501, "UNIMPLEMENTED"),
        errors.UnauthenticatedError: Status(401, "UNAUTHENTICATED"),
        errors.PermissionDeniedError: Status(403, "PERMISSION_DENIED"),
        errors.QueueFullError: _UNAVAILABLE,
        errors.RateLimitedError: Status(429, "RESOURCE_EXHAUSTED"),
        errors.NotReadyError: _UNAVAILABLE,
        errors.EngineRestartedError: _UNAVAILABLE,
        errors.AdapterLoadError: _UNAVAILABLE,
        errors.StorageFullError: Status(507, "RESOURCE_EXHAUSTED"),
        errors.StorageUnavailableError: _UNAVAILABLE,
        errors.DeadlineExceededError: Status(503, "DEADLINE_EXCEEDED"),
        errors.RowFailedError: _INTERNAL,
        errors.StepFailedError: _INTERNAL,
        errors.CrashingRequestError: _INTERNAL,
        errors.UnsupportedModelError: _INTERNAL,
    }
)
"""Every leaf of core.errors. The rows of _BRANCHES catch an error raised by its branch's name."""

_OWN: Mapping[type[errors.LoraplexError], Status] = MappingProxyType(
    {
        NotFoundError: _NOT_FOUND,
        AlreadyExistsError: Status(400, "ALREADY_EXISTS"),
    }
)

_BRANCHES: Mapping[type[errors.LoraplexError], Status] = MappingProxyType(
    {
        errors.RequestError: _INVALID,
        errors.CapacityError: _UNAVAILABLE,
        errors.LoraplexError: _INTERNAL,
    }
)

_PREFIXES: Mapping[type[errors.LoraplexError], str] = MappingProxyType(
    {
        errors.QueueFullError: "Exceeds maximum queue size: Maximum queue size of the server has "
        "been reached, please try again later: ",
    }
)
"""Words that clients of the TensorRT-LLM backend look for: the first over gRPC, then over HTTP."""


def status_of(error: errors.LoraplexError) -> Status:
    """The row of the error's class, or of the nearest class above it."""
    return status_of_kind(type(error))


def status_of_kind(kind: type[errors.LoraplexError]) -> Status:
    rows = {**_BRANCHES, **STATUS, **_OWN}
    return next(rows[cls] for cls in kind.__mro__ if cls in rows)


def message_of(error: errors.LoraplexError) -> str:
    return _PREFIXES.get(type(error), "") + error.message


def as_loraplex_error(error: BaseException) -> errors.LoraplexError:
    """The error itself, or for a defect of ours an InternalError; its traceback is logged."""
    if isinstance(error, FailedResponse):
        error = error.error
    passing = errors.passing_error(error)
    if passing is not None:
        logger.error("a KServe request failed: %s", error)
        error = passing
    if not isinstance(error, errors.LoraplexError):
        logger.error("a KServe request failed", exc_info=error)
        error = errors.InternalError("internal error; the server's log has the details")
    note_error(error)
    return error
