"""What llgtrt does not take in a request, field by field."""

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from loraplex.core.errors import InvalidParameterError
from loraplex.frontends.openai.llgtrt.compat_errors import ShapeError
from loraplex.frontends.openai.schema import ChatBody, GenerationBody

ROLES: Final = ("system", "user", "assistant", "tool")


class CompatRefusal(NamedTuple):
    field: str
    applies: Callable[[Any], bool]
    """Whether a body uses the feature."""
    message: str


COMPLETION_REFUSALS: Final = (
    CompatRefusal(
        "prompt", lambda body: not _is_one_text(body.prompt), "prompt must be a single string"
    ),
    CompatRefusal("logprobs", lambda body: body.logprobs is not None, "logprobs not supported yet"),
    CompatRefusal(
        "best_of", lambda body: body.best_of not in (None, 1), "best_of not supported yet"
    ),
    CompatRefusal("echo", lambda body: bool(body.echo), "echo not supported yet"),
    CompatRefusal(
        "suffix", lambda body: _extra(body, "suffix") is not None, "suffix not supported yet"
    ),
    CompatRefusal(
        "logit_bias", lambda body: body.logit_bias is not None, "logit_bias not supported yet"
    ),
)

CHAT_REFUSALS: Final = (
    CompatRefusal(
        "logit_bias", lambda body: body.logit_bias is not None, "logit_bias not supported yet"
    ),
    CompatRefusal(
        "top_logprobs",
        lambda body: (body.top_logprobs or 0) > 1,
        "logprobs > 1 not supported yet",
    ),
    CompatRefusal(
        "tool_choice",
        lambda body: isinstance(body.tool_choice, dict),
        "only simple options are currently supported for tool_choice",
    ),
    CompatRefusal("messages", lambda body: _has_image(body), "unexpected ImageUrl"),
)


def refuse(body: GenerationBody, refusals: Sequence[CompatRefusal]) -> None:
    """Raise InvalidParameterError for the first feature that the body uses."""
    for refusal in refusals:
        if refusal.applies(body):
            raise InvalidParameterError(refusal.message, param=refusal.field)


def check_shape(body: GenerationBody) -> None:
    """Raises ShapeError for what its parser does not read."""
    if body.model is None:
        raise ShapeError("model is required", 422, param="model")
    if isinstance(body.stop, str):
        raise ShapeError("stop must be a list of strings", 422, param="stop")
    if not isinstance(body, ChatBody):
        return
    for index, message in enumerate(body.messages):
        role = message["role"]
        if role not in ROLES:
            raise ShapeError(
                f"messages[{index}].role must be one of {', '.join(ROLES)}, got {role!r}",
                422,
                param=f"messages[{index}].role",
            )


def _is_one_text(prompt: Any) -> bool:
    is_list = isinstance(prompt, list)
    return isinstance(prompt[0] if is_list and len(prompt) == 1 else prompt, str)


def _has_image(body: ChatBody) -> bool:
    contents = [message.get("content") for message in body.messages]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return any(part["type"] == "image_url" for part in parts)


def _extra(body: GenerationBody, field: str) -> Any:
    return (body.model_extra or {}).get(field)
