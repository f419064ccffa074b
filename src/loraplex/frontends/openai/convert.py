"""From a request body of `schema` to what Backend is asked: pure functions, and every refusal that
needs no model.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from loraplex.core.adapter import AdapterChoice, AdapterKey, ByName, LoadPolicy
from loraplex.core.errors import (
    InvalidParameterError,
    InvalidRequestError,
    UnsupportedFeatureError,
)
from loraplex.core.request import GenerateRequest, RequestId
from loraplex.frontends.adapter_choices import read_choices
from loraplex.frontends.openai.sampling import chat_sampling, completion_sampling
from loraplex.frontends.openai.schema import (
    ChatBody,
    CompletionBody,
    ContentPart,
    GenerationBody,
    Message,
    SamplingBody,
)
from loraplex.frontends.openai.unsupported import refuse_unsupported
from loraplex.serving.backend import ModelCard

MAX_PRIORITY = 2**31 - 1

Prompt = str | tuple[int, ...]


class Target(NamedTuple):
    """What `model` named: a base model, and perhaps one of its adapters."""

    model: ModelCard
    key: AdapterKey | None


class Origin(NamedTuple):
    """What a GenerateRequest takes from the HTTP request, not from the body."""

    client_request_id: str
    new_request_id: Callable[[], RequestId]


def completion_requests(
    body: CompletionBody, target: Target, origin: Origin, max_prompts: int
) -> tuple[GenerateRequest, ...]:
    """One request for each prompt."""
    refuse_unsupported(body.model_extra)
    _check_generation(body)
    sampling = completion_sampling(body, target.model.vocab_size)
    adapters = adapter_choices(body, target)
    return tuple(
        GenerateRequest(
            request_id=origin.new_request_id(),
            client_request_id=origin.client_request_id,
            model=target.model.name,
            prompt=prompt,
            sampling=sampling,
            adapters=adapters,
            load_policy=load_policy(body),
            add_special_tokens=body.add_special_tokens is not False,
            priority=body.priority or 0,
            timeout_seconds=body.timeout_seconds,
        )
        for prompt in prompts(body.prompt, max_prompts)
    )


def check_chat(body: ChatBody) -> None:
    """Every refusal of a chat body that comes before its template is rendered."""
    refuse_unsupported(body.model_extra)
    _check_generation(body)
    if body.model_extra and body.model_extra.get("echo"):
        raise UnsupportedFeatureError("echo is not supported in chat completions", param="echo")
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise InvalidParameterError(
            "give max_tokens or max_completion_tokens, not both", param="max_completion_tokens"
        )


def chat_request(
    body: ChatBody, target: Target, origin: Origin, prompt: str
) -> tuple[GenerateRequest, ...]:
    """The request for a checked body whose conversation has been rendered into `prompt`."""
    return (
        GenerateRequest(
            request_id=origin.new_request_id(),
            client_request_id=origin.client_request_id,
            model=target.model.name,
            prompt=prompt,
            sampling=chat_sampling(body, target.model.vocab_size),
            adapters=adapter_choices(body, target),
            load_policy=load_policy(body),
            # The template has written them already.
            add_special_tokens=body.add_special_tokens is True,
            priority=body.priority or 0,
            timeout_seconds=body.timeout_seconds,
        ),
    )


def prompts(prompt: str | list[Any], max_prompts: int) -> list[Prompt]:
    """The four shapes of `prompt` as a list of texts or token ids."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise InvalidParameterError(
            "prompt is an empty list: it has nothing to go on", param="prompt"
        )
    if isinstance(prompt[0], int):
        return [tuple(prompt)]
    if len(prompt) > max_prompts:
        raise InvalidParameterError(
            f"prompt has {len(prompt)} prompts; at most {max_prompts} are allowed in one request",
            param="prompt",
        )
    return [item if isinstance(item, str) else tuple(item) for item in prompt]


def adapter_choices(body: GenerationBody, target: Target) -> tuple[AdapterChoice, ...]:
    """The adapter that `model` or `lora_model` names, or those of `adapters`.

    The first two may both name it if they agree.
    """
    key = target.key
    if body.adapters:
        return _several(body, key)
    if body.lora_model:
        named = ByName(body.lora_model)
        if key not in (None, named):
            raise InvalidParameterError(
                f"model {body.model!r} and lora_model {body.lora_model!r} name two adapters; "
                "give one of them",
                param="lora_model",
            )
        key = named
    if key is None:
        if body.lora_scale is not None:
            raise InvalidParameterError(
                "lora_scale needs an adapter: name it in model or lora_model", param="lora_scale"
            )
        return ()
    return (AdapterChoice(key, 1.0 if body.lora_scale is None else body.lora_scale),)


def _several(body: GenerationBody, key: AdapterKey | None) -> tuple[AdapterChoice, ...]:
    if key is not None or body.lora_model:
        raise InvalidParameterError(
            f"{'lora_model' if body.lora_model else 'model'} names an adapter, and so does "
            "adapters; put all of them into adapters, and the base model into model",
            param="adapters",
        )
    if body.lora_scale is not None:
        raise InvalidParameterError(
            "lora_scale is for the one adapter of model or lora_model; in adapters, each one has "
            "its scale",
            param="lora_scale",
        )
    return read_choices(body.adapters)


def load_policy(body: SamplingBody) -> LoadPolicy:
    return LoadPolicy(body.load_lora_weights or LoadPolicy.AUTO)


def _check_generation(body: GenerationBody) -> None:
    if body.stream_options is not None and not body.stream:
        raise InvalidParameterError(
            "stream_options is only for stream: true", param="stream_options"
        )
    if body.prompt_logprobs is not None and body.stream:
        raise InvalidParameterError(
            "prompt_logprobs is not for stream: true", param="prompt_logprobs"
        )
    check_priority(body)


def check_priority(body: SamplingBody) -> None:
    if abs(body.priority or 0) > MAX_PRIORITY:
        raise InvalidParameterError(
            f"priority must be in [{-MAX_PRIORITY}, {MAX_PRIORITY}], got {body.priority}",
            param="priority",
        )


def chat_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """What the chat template reads: content as one text, everything else as it came."""
    if not messages:
        raise InvalidParameterError("messages must hold at least one message", param="messages")
    return [
        {
            **(message.model_extra or {}),
            "role": message.role,
            "content": _content(message.content, f"messages[{index}].content"),
        }
        for index, message in enumerate(messages)
    ]


def _content(content: str | Sequence[ContentPart] | None, path: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return "\n".join(_part_text(part, f"{path}[{i}]") for i, part in enumerate(content))


def _part_text(part: ContentPart, path: str) -> str:
    if part.type != "text":
        raise UnsupportedFeatureError(
            f"{path} has type {part.type!r}; only 'text' parts are supported", param=path
        )
    if part.text is None:
        raise InvalidRequestError(f"{path}.text is required", param=f"{path}.text")
    return part.text
