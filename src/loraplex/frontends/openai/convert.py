"""Conversion of a request body of `schema` to requests of the Backend: pure functions, and every
refusal that needs no model.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from loraplex.core.adapter import AdapterChoice, LoadPolicy
from loraplex.core.errors import (
    InvalidParameterError,
    InvalidRequestError,
    UnsupportedFeatureError,
)
from loraplex.core.request import (
    REPEATED_BYTES,
    GenerateRequest,
    PromptTruncation,
    RequestId,
    TruncationSide,
)
from loraplex.core.sampling_params import MAX_N, SamplingParams
from loraplex.core.task import Generate
from loraplex.frontends.openai.adapter_fields import ModelTarget, adapter_choices
from loraplex.frontends.openai.sampling import chat_sampling, completion_sampling
from loraplex.frontends.openai.schema import (
    ChatBody,
    CompletionBody,
    ContentPart,
    GenerationBody,
    Message,
    SamplingBody,
    TokenizeBody,
)
from loraplex.frontends.openai.unsupported import refuse_unsupported
from loraplex.serving.text.chat_format import UNKNOWN_FORMAT, ChatFormat
from loraplex.serving.text.chat_messages import with_calls_as_text, with_tools_described
from loraplex.serving.text.completion_grammar import completion_grammar
from loraplex.serving.text.completion_reader import CompletionSyntax

MAX_PRIORITY = 2**31 - 1
MAX_SEQUENCES = 4096
"""Maximum number of sequences of all prompts of one request together."""
MAX_CACHE_SALT = 1024
"""Characters."""
ALL_THAT_FIT = -1
"""Value of truncate_prompt_tokens."""

Prompt = str | tuple[int, ...]


class Origin(NamedTuple):
    """What a GenerateRequest takes from the HTTP request, not from the body."""

    client_request_id: str
    new_request_id: Callable[[], RequestId]
    adapter: str = ""
    """Value of the header ADAPTER_HEADER."""


def completion_requests(
    body: CompletionBody, target: ModelTarget, origin: Origin, max_prompts: int
) -> tuple[GenerateRequest, ...]:
    """One request for each prompt."""
    if body.model_extra:
        refuse_unsupported(body)
    if not body.model_fields_set.isdisjoint(_CHECKED):
        _check_generation(body)
    sampling = completion_sampling(body, target.model.vocab_size)
    requested = prompts(body.prompt, max_prompts)
    _check_sequences(len(requested), sampling)
    chosen = adapter_choices(body, target, origin.adapter, len(requested))
    return tuple(
        _request(
            body,
            target,
            origin,
            sampling,
            prompt,
            adapters,
            add_special_tokens=body.add_special_tokens is not False,
            repeated_bytes=REPEATED_BYTES * (bool(body.echo) + bool(body.return_token_ids)),
        )
        for prompt, adapters in zip(requested, chosen, strict=True)
    )


def _request(
    body: GenerationBody,
    target: ModelTarget,
    origin: Origin,
    sampling: SamplingParams,
    prompt: Prompt,
    adapters: tuple[AdapterChoice, ...],
    **fields: Any,
) -> GenerateRequest:
    """Return the request for one prompt. fields: those that depend on the route."""
    return GenerateRequest(
        request_id=origin.new_request_id(),
        client_request_id=origin.client_request_id,
        model=target.model.name,
        prompt=prompt,
        task=Generate(sampling),
        adapters=adapters,
        load_policy=LoadPolicy(body.load_lora_weights or LoadPolicy.AUTO),
        priority=body.priority or 0,
        timeout_seconds=body.timeout_seconds,
        truncation=None if body.truncate_prompt_tokens is None else _truncation(body),
        cache_salt=body.cache_salt or "",
        **fields,
    )


def check_chat(body: ChatBody) -> None:
    """Every refusal of a chat body that comes before its template is rendered."""
    if body.model_extra:
        refuse_unsupported(body)
    if not body.model_fields_set.isdisjoint(_CHECKED):
        _check_generation(body)
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise InvalidParameterError(
            "give max_tokens or max_completion_tokens, not both", param="max_completion_tokens"
        )
    if body.continue_final_message and body.add_generation_prompt:
        raise InvalidParameterError(
            "continue_final_message goes on with the last message, add_generation_prompt begins a "
            "new one: give one of them",
            param="continue_final_message",
        )


class Conversation(NamedTuple):
    """What the chat template is given."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None


def conversation(
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None,
    chat_format: ChatFormat,
) -> Conversation:
    """A template without tools gets them in the messages, and earlier calls, too."""
    given: Sequence[Mapping[str, Any]] = chat_messages(messages)
    if not chat_format.writes_calls:
        given = with_calls_as_text(given, chat_format.call_format.syntax)
    if not tools or chat_format.knows_tools:
        return Conversation(given, tools or None)
    is_generic = chat_format.tool_calls == UNKNOWN_FORMAT.tool_calls
    return Conversation(with_tools_described(given, tools, describes_form=is_generic), None)


def chat_request(
    body: ChatBody, target: ModelTarget, origin: Origin, reading: CompletionSyntax
) -> tuple[GenerateRequest, ...]:
    """The request for a checked body whose conversation has been rendered into the prompt."""
    sampling = chat_sampling(body, target.model.vocab_size)
    grammar = completion_grammar(reading, sampling.grammar)
    return (
        _request(
            body,
            target,
            origin,
            msgspec.structs.replace(sampling, grammar=grammar),
            reading.prompt,
            adapter_choices(body, target, origin.adapter)[0],
            shown_special_ids=reading.shown_ids,
            # The template has written them already.
            add_special_tokens=body.add_special_tokens is True,
            repeated_bytes=REPEATED_BYTES * bool(body.echo),
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


def load_policy(body: SamplingBody) -> LoadPolicy:
    return LoadPolicy(body.load_lora_weights or LoadPolicy.AUTO)


_CHECKED: Final = frozenset({"stream_options", "prompt_logprobs", "cache_salt", "priority"})


def _check_generation(body: GenerationBody) -> None:
    """Check the fields of `_CHECKED`."""
    if body.stream_options is not None and not body.stream:
        raise InvalidParameterError(
            "stream_options is only for stream: true", param="stream_options"
        )
    if body.prompt_logprobs is not None and body.stream:
        raise InvalidParameterError(
            "prompt_logprobs is not for stream: true", param="prompt_logprobs"
        )
    if body.cache_salt is not None and not 0 < len(body.cache_salt) <= MAX_CACHE_SALT:
        raise InvalidParameterError(
            f"cache_salt must have 1 to {MAX_CACHE_SALT} characters, got {len(body.cache_salt)}",
            param="cache_salt",
        )
    check_priority(body)


def _truncation(body: GenerationBody) -> PromptTruncation:
    most = body.truncate_prompt_tokens or 0
    if most != ALL_THAT_FIT and most < 1:
        raise InvalidParameterError(
            f"truncate_prompt_tokens must be at least 1, or {ALL_THAT_FIT} for the maximum, "
            f"got {most}",
            param="truncate_prompt_tokens",
        )
    side = TruncationSide(body.truncation_side or TruncationSide.LEFT)
    return PromptTruncation(None if most == ALL_THAT_FIT else most, side)


def _check_sequences(num_prompts: int, sampling: SamplingParams) -> None:
    # Admission refuses more than MAX_N for one prompt.
    if num_prompts * min(sampling.num_sequences, MAX_N) > MAX_SEQUENCES:
        raise InvalidParameterError(
            f"{num_prompts} prompts with {sampling.num_sequences} outputs each are more than the "
            f"{MAX_SEQUENCES} outputs that one request may have",
            param="n",
        )


def check_priority(body: SamplingBody) -> None:
    if abs(body.priority or 0) > MAX_PRIORITY:
        raise InvalidParameterError(
            f"priority must be in [{-MAX_PRIORITY}, {MAX_PRIORITY}], got {body.priority}",
            param="priority",
        )


def chat_messages(messages: Sequence[Message]) -> list[Mapping[str, Any]]:
    """What the chat template reads: content as one text or text parts, all else as it came."""
    if not messages:
        raise InvalidParameterError("messages must hold at least one message", param="messages")
    return [_shown(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _shown(message: Message, path: str) -> Mapping[str, Any]:
    if message["role"] == "tool" and not isinstance(message.get("tool_call_id"), str):
        where = f"{path}.tool_call_id"
        raise InvalidRequestError(
            f"{where} must be the id of the call whose result the message is", param=where
        )
    content = message.get("content")
    if isinstance(content, str):
        return message
    if content is None:  # templates look whether there is content: not so in nothing but calls
        return {**message, "content": None if message.get("tool_calls") else ""}
    texts = [_part_text(part, f"{path}.content[{i}]") for i, part in enumerate(content)]
    return {**message, "content": [{"type": "text", "text": text} for text in texts]}


def begins_a_turn(body: ChatBody | TokenizeBody) -> bool:
    """Whether the template writes the beginning of the assistant's turn."""
    return body.add_generation_prompt is not False and not body.continue_final_message


def output_role(body: ChatBody) -> str:
    """Role of the generated message: the last one's, if that is continued."""
    return "assistant" if begins_a_turn(body) else body.messages[-1]["role"]


def echoed_message(body: ChatBody, role: str) -> str:
    """Text of vLLM's echo: the last message, if the output is of the same `role`."""
    last = body.messages[-1]
    if last["role"] != role:
        return ""
    return _content(last.get("content"), f"messages[{len(body.messages) - 1}].content")


def _content(content: str | Sequence[ContentPart] | None, path: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return "\n".join(_part_text(part, f"{path}[{i}]") for i, part in enumerate(content))


def _part_text(part: ContentPart, path: str) -> str:
    if part["type"] != "text":
        raise UnsupportedFeatureError(
            f"{path} has type {part['type']!r}; only 'text' parts are supported", param=path
        )
    text = part.get("text")
    if text is None:
        raise InvalidRequestError(f"{path}.text is required", param=f"{path}.text")
    return text
