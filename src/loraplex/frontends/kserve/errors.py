"""How errors of core.errors look to a Triton client: one table for HTTP and gRPC.

Triton itself has eight codes and returns 400 for everything that is not internal, not found,
unavailable or unsupported; we keep that, and add 401, 403, 408, 413, 429 and 507, which it has no
code for.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from loraplex.core import errors
from loraplex.core.adapter import AdapterChoice, ByName, ByTaskId
from loraplex.core.errors import AdapterNotFoundError, LoraplexError, PromptTooLongError
from loraplex.core.request import GenerateRequest
from loraplex.frontends.kserve.tensors import Tensor, strings
from loraplex.serving.wire_request import note_error

VLLM_PREFIX = "Error generating stream: "
_NO_TEXT = "N/A"


class FailedResponse(Exception):
    """An error that comes with outputs: vLLM's backend fills text_output even then."""

    def __init__(self, error: LoraplexError, outputs: tuple[Tensor, ...]) -> None:
        super().__init__(error.message)
        self.error = error
        self.outputs = outputs


def lora_failure(error: LoraplexError) -> FailedResponse:
    """Response to a request whose adapter failed; its text is the error's."""
    return FailedResponse(error, (strings("text_output", [error.message]),))


def vllm_failure(error: LoraplexError) -> FailedResponse:
    """Response to a request that failed for another reason."""
    shown = type(error)(
        VLLM_PREFIX + error.message,
        param=error.param,
        retry_after_seconds=error.retry_after_seconds,
    )
    return FailedResponse(shown, (strings("text_output", [_NO_TEXT]),))


def unknown_lora(
    error: AdapterNotFoundError, request: GenerateRequest, known: Sequence[str]
) -> LoraplexError | FailedResponse:
    """Error in the vLLM backend's words, with the known names as Python writes a list."""
    match request.adapters:
        case (AdapterChoice(key=ByName(name=name)),):
            if error.reason:
                text = f"LoRA {name} could not be loaded: {error.reason}"
            else:
                text = f"LoRA {name} is not supported, we currently support {list(known)}"
            return lora_failure(AdapterNotFoundError(text, param="lora_name"))
        case _:
            return error


def in_tensorrt_words(
    error: LoraplexError, request: GenerateRequest, count: Callable[[], int], limit: int
) -> LoraplexError:
    """Sentences that clients of TensorRT-LLM look for.

    `count` gives the length of the prompt in tokens, `limit` is the longest that is taken.
    """
    match error, request.adapters:
        case AdapterNotFoundError(), (AdapterChoice(key=ByTaskId(task_id=task_id)),):
            # How they know that an adapter is not there.
            sentence = (
                f"LoRA task {task_id} not found in cache. Please send LoRA weights with request"
            )
            is_said = sentence in error.message
            text = error.message if is_said else f"{sentence} ({error.message})"
            return AdapterNotFoundError(text, param="lora_task_id")
        case PromptTooLongError(param="prompt"), _:
            sentence = f"Prompt length ({count()}) exceeds maximum input length ({limit})"
            return PromptTooLongError(f"{sentence}. {error.message}", param="prompt")
    return error


logger = logging.getLogger(__name__)


class WireStatus(NamedTuple):
    http: int
    grpc: str
    """Name of the grpc.StatusCode."""


class NotFoundError(errors.RequestError):
    """What only this protocol knows by name is not there: a region of shared memory."""

    code = "not_found"


class AlreadyExistsError(errors.RequestError):
    """The name is taken."""

    code = "already_exists"


_INVALID = WireStatus(400, "INVALID_ARGUMENT")
_NOT_FOUND = WireStatus(404, "NOT_FOUND")
_UNAVAILABLE = WireStatus(503, "UNAVAILABLE")
_INTERNAL = WireStatus(500, "INTERNAL")

STATUS: Mapping[type[errors.LoraplexError], WireStatus] = MappingProxyType(
    {
        errors.InvalidRequestError: _INVALID,
        errors.InvalidParameterError: _INVALID,
        errors.InvalidTensorError: _INVALID,
        errors.PromptTooLongError: _INVALID,
        errors.TokenOutOfVocabularyError: _INVALID,
        errors.PayloadTooLargeError: WireStatus(413, "RESOURCE_EXHAUSTED"),
        errors.BodyTimeoutError: WireStatus(408, "DEADLINE_EXCEEDED"),
        errors.ModelNotFoundError: _NOT_FOUND,
        errors.AdapterNotFoundError: _NOT_FOUND,
        errors.ResponseNotFoundError: _NOT_FOUND,
        errors.UploadNotFoundError: _NOT_FOUND,
        errors.AdapterExistsError: WireStatus(400, "ALREADY_EXISTS"),
        errors.InvalidAdapterError: _INVALID,
        errors.AdapterMismatchError: _INVALID,
        errors.AdapterTooLargeError: _INVALID,
        errors.UnsupportedFeatureError: WireStatus(501, "UNIMPLEMENTED"),
        errors.UnauthenticatedError: WireStatus(401, "UNAUTHENTICATED"),
        errors.PermissionDeniedError: WireStatus(403, "PERMISSION_DENIED"),
        errors.QueueFullError: _UNAVAILABLE,
        errors.RateLimitedError: WireStatus(429, "RESOURCE_EXHAUSTED"),
        errors.NotReadyError: _UNAVAILABLE,
        errors.EngineRestartedError: _UNAVAILABLE,
        errors.AdapterLoadError: _UNAVAILABLE,
        errors.StorageFullError: WireStatus(507, "RESOURCE_EXHAUSTED"),
        errors.StorageUnavailableError: _UNAVAILABLE,
        errors.DeadlineExceededError: WireStatus(503, "DEADLINE_EXCEEDED"),
        errors.RowFailedError: _INTERNAL,
        errors.StepFailedError: _INTERNAL,
        errors.CrashingRequestError: _INTERNAL,
        errors.UnsupportedModelError: _INTERNAL,
    }
)
"""Every leaf of core.errors. The rows of _BRANCHES catch an error raised by its branch's name."""

_OWN: Mapping[type[errors.LoraplexError], WireStatus] = MappingProxyType(
    {
        NotFoundError: _NOT_FOUND,
        AlreadyExistsError: WireStatus(400, "ALREADY_EXISTS"),
    }
)

_BRANCHES: Mapping[type[errors.LoraplexError], WireStatus] = MappingProxyType(
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


def status_of(error: errors.LoraplexError) -> WireStatus:
    """The row of the error's class, or of the nearest class above it."""
    return status_of_kind(type(error))


def status_of_kind(kind: type[errors.LoraplexError]) -> WireStatus:
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
