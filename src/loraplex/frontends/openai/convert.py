"""Conversion of a request body of `schema` to requests of the Backend, and every refusal that needs
no model. The conversation of a chat becomes the text of the model's template, off the event loop.
"""

import asyncio
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import msgspec

from loraplex.core.adapter import AdapterChoice, LoadPolicy
from loraplex.core.errors import (
    InvalidParameterError,
    InvalidRequestError,
    UnsupportedFeatureError,
)
from loraplex.core.principal import Principal
from loraplex.core.request import (
    REPEATED_BYTES,
    GenerateRequest,
    PromptTruncation,
    RequestId,
    TruncationSide,
)
from loraplex.core.sampling_params import MAX_N, SamplingParams
from loraplex.core.task import Generate
from loraplex.frontends.field_names import Reworded, as_sent
from loraplex.frontends.openai.adapter_fields import ModelTarget, adapter_choices
from loraplex.frontends.openai.context import TextContext
from loraplex.frontends.openai.errors import raise_all
from loraplex.frontends.openai.sampling import chat_sampling, completion_sampling, sent_names
from loraplex.frontends.openai.schema import (
    ChatBody,
    CompareBody,
    CompletionBody,
    ContentPart,
    GenerationBody,
    Message,
    PooledBody,
    SamplingBody,
    TokenizeBody,
)
from loraplex.frontends.openai.tools import left_out, read_tool_use, read_tools, shown_tools
from loraplex.frontends.openai.unsupported import refuse_unsupported
from loraplex.serving.backend import ModelCard, TextBackend
from loraplex.serving.text.chat_format import (
    UNKNOWN_FORMAT,
    ChatFormat,
    CompletionSyntax,
    completion_grammar,
)
from loraplex.serving.text.chat_messages import with_calls_as_text, with_tools_described
from loraplex.serving.text.tool_calls.formats import FORMATS

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
    if body.echo and target.model.encoder is not None:
        raise UnsupportedFeatureError(
            f"model {target.model.name!r} has an encoder, so its output does not continue the "
            "prompt: leave out echo",
            param="echo",
        )
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
            decoder_prompt=(
                tuple(body.decoder_prompt)
                if isinstance(body.decoder_prompt, list)
                else body.decoder_prompt
            ),
            forced_bos_token_id=body.forced_bos_token_id,
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
        truncation=None if body.truncate_prompt_tokens is None else truncation(body),
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
        raise two_beginnings()


def two_beginnings() -> InvalidParameterError:
    """Return the refusal of a body whose output would be in the last message and in a new one."""
    return InvalidParameterError(
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
        given = with_calls_as_text(given, FORMATS[chat_format.tool_calls].syntax)
    if not tools or chat_format.knows_tools:
        return Conversation(given, tools or None)
    is_generic = chat_format.tool_calls == UNKNOWN_FORMAT.tool_calls
    return Conversation(with_tools_described(given, tools, describes_form=is_generic), None)


def requests_of_chat(
    body: ChatBody, target: ModelTarget, origin: Origin, reading: CompletionSyntax
) -> tuple[GenerateRequest, ...]:
    """The request for a checked body whose conversation has been rendered into the prompt."""
    sampling = chat_sampling(body, target.model.vocab_size)
    if reading.tool_use is not None or sampling.grammar is not None:
        sampling = msgspec.structs.replace(
            sampling, grammar=completion_grammar(reading, sampling.grammar)
        )
    return (
        _request(
            body,
            target,
            origin,
            sampling,
            reading.prompt,
            adapter_choices(body, target, origin.adapter)[0],
            shown_special_ids=reading.chat_format.shown_ids[reading.tool_use is not None],
            # The template has written them already.
            add_special_tokens=body.add_special_tokens is True,
            repeated_bytes=REPEATED_BYTES * bool(body.echo),
        ),
    )


def prompts(prompt: str | list[Any], max_prompts: int, field: str = "prompt") -> list[Prompt]:
    """The four shapes of `prompt`, the value of a field, as a list of texts or token ids."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise InvalidParameterError(
            f"{field} is an empty list: it has nothing to go on", param=field
        )
    if isinstance(prompt[0], int):
        return [tuple(prompt)]
    if len(prompt) > max_prompts:
        raise InvalidParameterError(
            f"{field} has {len(prompt)} {field}s; at most {max_prompts} are allowed in one request",
            param=field,
        )
    return [item if isinstance(item, str) else tuple(item) for item in prompt]


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
    check_salt(body)
    check_priority(body)


def check_salt(body: GenerationBody | PooledBody) -> None:
    if body.cache_salt is not None and not 0 < len(body.cache_salt) <= MAX_CACHE_SALT:
        raise InvalidParameterError(
            f"cache_salt must have 1 to {MAX_CACHE_SALT} characters, got {len(body.cache_salt)}",
            param="cache_salt",
        )


def truncation(
    body: GenerationBody | PooledBody, default: TruncationSide = TruncationSide.LEFT
) -> PromptTruncation | None:
    """Return what is left of prompts that are too long; None: they are errors.

    default: the side where tokens are taken away if the body names none.
    """
    most = body.truncate_prompt_tokens
    if most is None:
        return None
    if most != ALL_THAT_FIT and most < 1:
        raise InvalidParameterError(
            f"truncate_prompt_tokens must be at least 1, or {ALL_THAT_FIT} for the maximum, "
            f"got {most}",
            param="truncate_prompt_tokens",
        )
    side = TruncationSide(body.truncation_side or default)
    return PromptTruncation(None if most == ALL_THAT_FIT else most, side)


def _check_sequences(num_prompts: int, sampling: SamplingParams) -> None:
    # Admission refuses more than MAX_N for one prompt.
    if num_prompts * min(sampling.num_sequences, MAX_N) > MAX_SEQUENCES:
        raise InvalidParameterError(
            f"{num_prompts} prompts with {sampling.num_sequences} outputs each are more than the "
            f"{MAX_SEQUENCES} outputs that one request may have",
            param="n",
        )


def check_priority(body: SamplingBody | PooledBody) -> None:
    if abs(body.priority or 0) > MAX_PRIORITY:
        raise InvalidParameterError(
            f"priority must be in [{-MAX_PRIORITY}, {MAX_PRIORITY}], got {body.priority}",
            param="priority",
        )


def chat_messages(messages: Sequence[Message]) -> list[Mapping[str, Any]]:
    """What the chat template reads: content as one text or text parts, all else as it came."""
    if not messages:
        raise InvalidParameterError("messages must hold at least one message", param="messages")
    shown: list[Mapping[str, Any]] = []
    for index, message in enumerate(messages):
        path, content = f"messages[{index}]", message.get("content")
        if message["role"] == "tool" and not isinstance(message.get("tool_call_id"), str):
            where = f"{path}.tool_call_id"
            raise InvalidRequestError(
                f"{where} must be the id of the call whose result the message is", param=where
            )
        if isinstance(content, str):
            shown.append(message)
        elif content is None:
            # Templates look whether there is content: not so in nothing but calls.
            shown.append({**message, "content": None if message.get("tool_calls") else ""})
        else:
            texts = [_part_text(part, f"{path}.content[{i}]") for i, part in enumerate(content)]
            parts = [{"type": "text", "text": text} for text in texts]
            shown.append({**message, "content": parts})
    return shown


def begins_a_turn(body: ChatBody | CompareBody | TokenizeBody) -> bool:
    """Whether the template writes the beginning of the assistant's turn."""
    return body.add_generation_prompt is not False and not body.continue_final_message


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


class ChatRequest(NamedTuple):
    """The one request of a chat, and how its outputs are parsed."""

    requests: tuple[GenerateRequest, ...]
    reading: CompletionSyntax
    reworded: Reworded
    """Names the client's fields in an error."""
    role: str = "assistant"
    """Role of the generated message: the last one's, if that is continued."""
    notes: tuple[str, ...] = ()
    """What was left out of it."""


async def chat_request(
    context: TextContext, body: ChatBody, principal: Principal, origin: Origin
) -> ChatRequest:
    """Convert a body. Raises a RequestError for an invalid body, or one its template refuses."""
    tool_use = None
    if not body.tools and body.tool_choice is None:
        check_chat(body)
    else:
        raise_all([lambda: check_chat(body), lambda: read_tools(body.tools)])
        tool_use = read_tool_use(body.tools, body.tool_choice, body.parallel_tool_calls)
    target = await context.options.dialect.target(context, body, principal)
    reading = CompletionSyntax(
        chat_format=target.model.chat,
        tool_use=tool_use,
        prompt=await rendered(context, body, target),
        includes_reasoning=body.include_reasoning is not False,
        separates_reasoning=body.separate_reasoning is not False,
    )
    requests = requests_of_chat(body, target, origin, reading)
    return ChatRequest(
        requests,
        reading,
        lambda error: as_sent(error, sent_names(body)),
        "assistant" if begins_a_turn(body) else body.messages[-1]["role"],
        left_out(body.tools) if body.tools else (),
    )


async def rendered(context: TextContext, body: ChatBody, target: ModelTarget) -> str:
    """The conversation as the model's chat template writes it."""
    arguments = {
        "add_generation_prompt": begins_a_turn(body),
        "continue_final_message": bool(body.continue_final_message),
        "documents": body.documents,
        **context.options.dialect.rendering(body),
    }
    tools = shown_tools(body) if body.tools else None
    return await rendered_chat(context.backend, target.model, body.messages, tools, arguments)


_INLINE_SIZE = 32 * 1024
"""Smaller conversations are converted on the event loop: a thread's hand-over would cost more."""

_VALUE_SIZE = 512
"""Cost of a value in addition to its characters: the number of messages, more than their text, is
what takes time to """

_NOTHING: Mapping[str, Any] = MappingProxyType({})


async def rendered_chat(
    backend: TextBackend,
    card: ModelCard,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None = None,
    arguments: Mapping[str, Any] = _NOTHING,
) -> str:
    """The prompt text. arguments: of Chats.render, where they win over what is said here.

    Raises a RequestError for messages that cannot be shown, or that the template refuses.
    """
    show = functools.partial(conversation, messages, tools, card.chat)
    is_long = is_longer((messages, tools, arguments), _INLINE_SIZE)
    shown = await asyncio.to_thread(show) if is_long else show()
    return await backend.model(card.name).chats.render(
        shown.messages, **{"tools": shown.tools, **arguments}
    )


def is_longer(value: Any, size: int) -> bool:
    """Whether messages and values of JSON are of more than this size; sees no more of them."""
    unseen: list[Iterator[Any]] = [iter((value,))]
    while unseen:
        for item in unseen[-1]:
            size -= _VALUE_SIZE + (len(item) if isinstance(item, str) else 0)
            if size < 0:
                return True
            parts = item.values() if isinstance(item, Mapping) else item
            unseen.append(iter(parts if isinstance(item, Mapping | list | tuple) else ()))
            break
        else:
            unseen.pop()
    return False
