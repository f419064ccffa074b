"""Errors in the words that the clients of each backend look for."""

from collections.abc import Callable, Sequence

from loraplex.core.adapter import AdapterChoice, ByName, ByTaskId
from loraplex.core.errors import AdapterNotFoundError, LoraplexError, PromptTooLongError
from loraplex.core.request import GenerateRequest
from loraplex.frontends.kserve.tensors import Tensor, strings

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
    match error:
        case AdapterNotFoundError():
            return _unknown_task(error, request)
        case PromptTooLongError(param="prompt"):
            sentence = f"Prompt length ({count()}) exceeds maximum input length ({limit})"
            return PromptTooLongError(f"{sentence}. {error.message}", param="prompt")
    return error


def _unknown_task(error: AdapterNotFoundError, request: GenerateRequest) -> LoraplexError:
    """How they know that an adapter is not there."""
    match request.adapters:
        case (AdapterChoice(key=ByTaskId(task_id=task_id)),):
            pass
        case _:
            return error
    sentence = f"LoRA task {task_id} not found in cache. Please send LoRA weights with request"
    message = error.message if sentence in error.message else f"{sentence} ({error.message})"
    return AdapterNotFoundError(message, param="lora_task_id")
