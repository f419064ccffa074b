"""The tree of errors that users of loraplex see.

    LoraplexError
    ├── RequestError                 the client can fix it
    │   ├── InvalidRequestError          the message itself is malformed
    │   ├── InvalidParameterError        a value is out of its range
    │   ├── InvalidTensorError           a tensor has the wrong name, type or shape
    │   ├── PromptTooLongError
    │   ├── TokenOutOfVocabularyError
    │   ├── PayloadTooLargeError
    │   ├── BodyTimeoutError             the rest of the body did not arrive in time
    │   ├── ModelNotFoundError
    │   ├── AdapterNotFoundError
    │   ├── ResponseNotFoundError        not stored, or no longer
    │   ├── UploadNotFoundError          never begun, removed, or too old
    │   ├── AdapterExistsError
    │   ├── InvalidAdapterError          a file is broken, or has unsupported tensors
    │   ├── AdapterMismatchError         made for another base model
    │   ├── AdapterTooLargeError         can never fit: rank or bytes
    │   ├── UnsupportedFeatureError      known, but not served (yet)
    │   ├── UnauthenticatedError
    │   └── PermissionDeniedError
    ├── CapacityError                try again later
    │   ├── QueueFullError
    │   ├── RateLimitedError             the tenant's rate limit is exceeded
    │   ├── NotReadyError                starting, draining or restarting
    │   ├── EngineRestartedError         the engine died under the request
    │   ├── AdapterLoadError             a load failed; it is retried after a pause
    │   ├── StorageFullError             the disk of the state directory is full
    │   ├── StorageUnavailableError      the state directory is gone, read-only or broken
    │   └── DeadlineExceededError
    ├── InternalError                a defect of loraplex or its machine
    │   ├── RowFailedError               one row of a step failed
    │   ├── StepFailedError              a whole step failed
    │   └── CrashingRequestError         engines died while they computed this request
    └── ConfigError                  the operator can fix it; it never reaches a client
        └── UnsupportedModelError

Each leaf has a stable `code`. Each front end maps the leaves in one table (a test proves the
tables total). An error crosses a process as an `ErrorInfo`.
"""

import errno
import re
from typing import ClassVar, Final

import msgspec

from loraplex.core.url_secrets import without_url_secrets

SHORTAGES: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
"""Numbers of system errors that are no fault of the file or address at which they appear."""
_PASSING_SECONDS: Final = 5.0
_MAX_CAUSES: Final = 8
MAX_QUOTED: Final = 200
"""Characters of a client's value that an error quotes."""
MAX_MESSAGE: Final = 4096
"""Characters of an error that a client gets: it may quote several values."""
_LONG: Final = re.compile(rf"\S{{{MAX_QUOTED + 1},}}")


def brief(message: str) -> str:
    """Shorten what a message quotes of a client's values: a name may have a megabyte.

    The beginning and the end stay: they have most of what a name, a path and a sentence mean.
    """
    if len(message) <= MAX_QUOTED:
        return message
    return cut(_LONG.sub(lambda found: cut(found.group()), message), MAX_MESSAGE)


def cut(text: str, most: int = MAX_QUOTED) -> str:
    """Leave out the middle of a text that is longer."""
    if len(text) <= most:
        return text
    end = most // 4
    return f"{text[: most - end - 3]}...{text[-end:]}"


class ErrorInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """An error as it travels between processes."""

    code: str
    message: str
    param: str | None = None
    retry_after_seconds: float | None = None


class LoraplexError(Exception):
    """Root of the tree. `message` is written for the person who sent the request."""

    code: ClassVar[str] = "error"

    def __init__(
        self, message: str, *, param: str | None = None, retry_after_seconds: float | None = None
    ) -> None:
        # Errors of libraries, which are part of many messages, name URLs in full.
        message = without_url_secrets(message)
        if not isinstance(self, ConfigError):
            message = brief(message)
            param = None if param is None else cut(param)
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_seconds = retry_after_seconds

    def to_info(self) -> ErrorInfo:
        return ErrorInfo(self.code, self.message, self.param, self.retry_after_seconds)


class RequestError(LoraplexError):
    """An error that the client can fix."""

    code = "request_error"


class InvalidRequestError(RequestError):
    code = "invalid_request"


class InvalidParameterError(RequestError):
    code = "invalid_parameter"


class InvalidTensorError(RequestError):
    code = "invalid_tensor"


class PromptTooLongError(RequestError):
    code = "prompt_too_long"


class TokenOutOfVocabularyError(RequestError):
    code = "token_out_of_vocabulary"


class PayloadTooLargeError(RequestError):
    code = "payload_too_large"


class BodyTimeoutError(RequestError):
    code = "body_timeout"


class ModelNotFoundError(RequestError):
    code = "model_not_found"


class AdapterNotFoundError(RequestError):
    code = "adapter_not_found"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        retry_after_seconds: float | None = None,
        reason: str = "",
    ) -> None:
        """reason: why an adapter that is configured is missing; the message includes it."""
        super().__init__(message, param=param, retry_after_seconds=retry_after_seconds)
        self.reason = reason


class ResponseNotFoundError(RequestError):
    code = "response_not_found"


class UploadNotFoundError(RequestError):
    code = "upload_not_found"


class AdapterExistsError(RequestError):
    code = "adapter_exists"


class InvalidAdapterError(RequestError):
    code = "invalid_adapter"


class AdapterMismatchError(RequestError):
    code = "adapter_mismatch"


class AdapterTooLargeError(RequestError):
    code = "adapter_too_large"


class UnsupportedFeatureError(RequestError):
    code = "unsupported_feature"


class UnauthenticatedError(RequestError):
    code = "unauthenticated"


class PermissionDeniedError(RequestError):
    code = "permission_denied"


class CapacityError(LoraplexError):
    """A lack of capacity: the request is valid, and may be sent again later."""

    code = "capacity_error"


class QueueFullError(CapacityError):
    code = "queue_full"


class RateLimitedError(CapacityError):
    code = "rate_limited"


class NotReadyError(CapacityError):
    code = "not_ready"


class EngineRestartedError(CapacityError):
    code = "engine_restarted"


class AdapterLoadError(CapacityError):
    code = "adapter_load_failed"


class StorageFullError(CapacityError):
    code = "storage_full"


class StorageUnavailableError(CapacityError):
    code = "storage_unavailable"


class DeadlineExceededError(CapacityError):
    code = "deadline_exceeded"


class InternalError(LoraplexError):
    """A failure that neither client nor operator can fix."""

    code = "internal_error"


class RowFailedError(InternalError):
    code = "row_failed"


class StepFailedError(InternalError):
    code = "step_failed"


class DeviceLost(Exception):
    """The device cannot compute any more in this process. It ends the engine; the next engine
    continues its requests."""


class CrashingRequestError(InternalError):
    code = "request_crashed_engine"


class ConfigError(LoraplexError):
    """An error in a flag, a file or a model folder, which the operator can fix."""

    code = "invalid_config"


class UnsupportedModelError(ConfigError):
    code = "unsupported_model"


def _tree(root: type[LoraplexError]) -> list[type[LoraplexError]]:
    return [root, *(leaf for child in root.__subclasses__() for leaf in _tree(child))]


def leaves(root: type[LoraplexError] = LoraplexError) -> list[type[LoraplexError]]:
    """Return the classes of this file below root that have no subclass in this file."""
    tree = [error for error in _tree(root) if error.__module__ == __name__]
    return [error for error in tree if not set(tree) & set(error.__subclasses__())]


ERROR_CLASSES: dict[str, type[LoraplexError]] = {cls.code: cls for cls in _tree(LoraplexError)}


def passing_error(error: BaseException | None) -> NotReadyError | None:
    """Return the error for a client whose request met a fault of the machine that may pass; None
    for other errors.

    Faults are a lack of file descriptors or memory, wherever it was met, and files of the
    operator's configuration that cannot be read for now.
    """
    is_of_config = isinstance(error, ConfigError)
    for _ in range(_MAX_CAUSES):
        number = getattr(error, "errno", None)
        if number in SHORTAGES:
            lacking = "memory" if number == errno.ENOMEM else "file descriptors"
            return NotReadyError(
                f"the server has too few {lacking} for now: try again",
                retry_after_seconds=_PASSING_SECONDS,
            )
        if is_of_config and isinstance(error, OSError):
            return NotReadyError(
                "the server cannot read files of its configuration for now: try again; its log has "
                "the details",
                retry_after_seconds=_PASSING_SECONDS,
            )
        error = error and (error.__cause__ or error.__context__)
    return None


def error_from_info(info: ErrorInfo) -> LoraplexError:
    """Return the error that another process described; an unknown code gives an InternalError."""
    cls = ERROR_CLASSES.get(info.code, InternalError)
    return cls(info.message, param=info.param, retry_after_seconds=info.retry_after_seconds)
