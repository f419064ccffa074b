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

from typing import ClassVar

import msgspec


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


def error_from_info(info: ErrorInfo) -> LoraplexError:
    """Return the error that another process described; an unknown code gives an InternalError."""
    cls = ERROR_CLASSES.get(info.code, InternalError)
    return cls(info.message, param=info.param, retry_after_seconds=info.retry_after_seconds)
