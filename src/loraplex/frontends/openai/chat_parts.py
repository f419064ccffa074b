"""Conversion of parsed output to the fields of a chat message or delta."""

from collections.abc import Sequence

from msgspec import UNSET

from loraplex.core.output import FinishReason, SequenceOutput
from loraplex.core.tools import CallDelta
from loraplex.frontends.openai.responses import (
    CalledFunction,
    ChatDelta,
    ChatMessage,
    FunctionDelta,
    ToolCall,
    ToolCallDelta,
)
from loraplex.serving.text.completion_reader import (
    CompletionDelta,
    CompletionReader,
    CompletionSyntax,
)

TOOL_CALLS = "tool_calls"
"""Finish reason of a message that ended with calls: the client returns their results."""


class ChatParts:
    """Outputs of one request, by sequence, split into their parts as they come."""

    def __init__(self, reading: CompletionSyntax) -> None:
        self._reading = reading
        self._readers: dict[int, CompletionReader] = {}

    def read(self, sequence: SequenceOutput) -> CompletionDelta:
        """What the sequence's new text brought."""
        reader = self._readers.get(sequence.index)
        if reader is None:
            reader = self._readers[sequence.index] = self._reading.reader()
        reason = sequence.finish_reason
        is_cut = reason not in (None, FinishReason.STOP)
        return reader.push(sequence.text, final=reason is not None, is_cut=is_cut)

    def finish_reason(self, sequence: SequenceOutput) -> str | None:
        """OpenAI's reason: `tool_calls` if there is any, unless the client chose their function."""
        is_stopped = sequence.finish_reason is FinishReason.STOP
        if is_stopped and self._readers[sequence.index].num_calls and not self._reading.is_named:
            return TOOL_CALLS
        return sequence.finish_reason


def message(part: CompletionDelta, role: str, text_before: str) -> ChatMessage:
    """The whole message; text_before: what its content begins with."""
    calls = _whole_calls(part.calls)
    content = text_before + part.content
    return ChatMessage(
        content=content if content or not calls else None,
        role=role,
        reasoning_content=part.reasoning or UNSET,
        reasoning=part.reasoning or UNSET,
        tool_calls=calls or UNSET,
    )


def delta(part: CompletionDelta) -> ChatDelta:
    return ChatDelta(
        content=part.content or UNSET,
        reasoning_content=part.reasoning or UNSET,
        reasoning=part.reasoning or UNSET,
        tool_calls=[_call_delta(call) for call in part.calls] or UNSET,
    )


def _call_delta(call: CallDelta) -> ToolCallDelta:
    begins = call.name is not None
    return ToolCallDelta(
        index=call.index,
        id=UNSET if call.call_id is None else call.call_id,
        type="function" if begins else UNSET,
        function=FunctionDelta(call.arguments, UNSET if call.name is None else call.name),
    )


def _whole_calls(deltas: Sequence[CallDelta]) -> list[ToolCall]:
    """Tool calls in the order of their index; a delta with a name begins one."""
    arguments: dict[int, list[str]] = {}
    for part in deltas:
        arguments.setdefault(part.index, []).append(part.arguments)
    return [
        ToolCall(
            id=part.call_id or "",
            function=CalledFunction(part.name, "".join(arguments[part.index])),
        )
        for part in deltas
        if part.name is not None
    ]
