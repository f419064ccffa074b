"""From a request body of `schema` to what Backend is asked: pure functions, and every refusal that
needs no model.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from loraplex.core.adapter import AdapterChoice, AdapterKey, ByName, LoadPolicy
from loraplex.core.errors import (
    InvalidParameterError,
    InvalidRequestError,
    TokenOutOfVocabularyError,
    UnsupportedFeatureError,
)
from loraplex.core.request import GenerateRequest, RequestId
from loraplex.core.sampling_params import MAX_LOGPROBS, SamplingParams
from loraplex.frontends.adapter_choices import read_choices
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

_SAMPLING_FIELDS = {
    "min_tokens": "min_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "seed": "seed",
    "include_stop_str_in_output": "include_stop_in_output",
    "ignore_eos": "ignore_eos",
    "skip_special_tokens": "skip_special_tokens",
}
"""Name on the wire: name in SamplingParams. A null keeps the default."""

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


def completion_sampling(body: CompletionBody, vocab_size: int) -> SamplingParams:
    if body.max_tokens == 0:
        raise InvalidParameterError(
            "max_tokens must be at least 1; to score a prompt, ask for 1 token with echo and "
            "logprobs",
            param="max_tokens",
        )
    n = 1 if body.n is None else body.n
    if body.best_of not in (None, n):
        raise UnsupportedFeatureError(
            f"best_of ({body.best_of}) other than n ({n}) is not supported", param="best_of"
        )
    fields: dict[str, Any] = {"logprobs": body.logprobs, "n": n}
    if body.max_tokens is not None:
        fields["max_tokens"] = body.max_tokens
    fields["prompt_logprobs"] = body.prompt_logprobs
    if body.echo and body.logprobs is not None:
        fields["prompt_logprobs"] = max(body.logprobs, body.prompt_logprobs or 0)
    return sampling_params(body, fields, vocab_size)


def chat_sampling(body: ChatBody, vocab_size: int) -> SamplingParams:
    max_tokens = (
        body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    )
    fields: dict[str, Any] = {"max_tokens": max_tokens, "prompt_logprobs": body.prompt_logprobs}
    if body.n is not None:
        fields["n"] = body.n
    num_top = body.top_logprobs or 0
    if not 0 <= num_top <= MAX_LOGPROBS:
        raise InvalidParameterError(
            f"top_logprobs must be in [0, {MAX_LOGPROBS}], got {num_top}", param="top_logprobs"
        )
    if body.logprobs:
        fields["logprobs"] = num_top
    elif num_top:
        raise InvalidParameterError("top_logprobs needs logprobs: true", param="top_logprobs")
    return sampling_params(body, fields, vocab_size)


def sampling_params(body: SamplingBody, fields: dict[str, Any], vocab_size: int) -> SamplingParams:
    """From what all bodies have, and `fields` of SamplingParams that only this one has."""
    given = {name: getattr(body, wire_name) for wire_name, name in _SAMPLING_FIELDS.items()}
    fields |= {name: value for name, value in given.items() if value is not None}
    stop = body.stop or ()
    sampling = SamplingParams(
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stop_token_ids=_stop_token_ids(body.stop_token_ids or (), vocab_size),
        **fields,
    )
    sampling.validate()
    return sampling


def _stop_token_ids(token_ids: Sequence[int], vocab_size: int) -> tuple[int, ...]:
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise TokenOutOfVocabularyError(
                f"stop_token_ids has {token_id}; token ids of this model are 0 to {vocab_size - 1}",
                param="stop_token_ids",
            )
    return tuple(token_ids)


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
