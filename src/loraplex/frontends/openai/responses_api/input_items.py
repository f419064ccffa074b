"""Conversion of input items to the messages of a chat: pure functions, and every refusal.

What the model wrote in one turn (reasoning, text, calls) is several items here and one message in a
chat.
"""

import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from loraplex.core.errors import InvalidParameterError, UnsupportedFeatureError

MAX_ITEMS: Final = 8192
"""Maximum number of items in a whole conversation."""
_ROLES: Final = ("user", "system", "developer", "assistant")
_TEXT_PARTS: Final = ("input_text", "output_text", "text")
_SERVED: Final = ("message", "function_call", "function_call_output", "reasoning")

Item = dict[str, Any]


def new_id(prefix: str) -> str:
    """Return a random id of an item or a response."""
    return f"{prefix}_{secrets.token_hex(24)}"


def read_input(given: str | Sequence[Mapping[str, Any]]) -> list[Item]:
    """The input as items in their full form: with an id, a type, a status, and content as parts.

    Raises InvalidParameterError or UnsupportedFeatureError, whose param is the item's place.
    """
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not given:
        raise _invalid("input", "is an empty list: there is nothing to respond to")
    if len(given) > MAX_ITEMS:
        raise _invalid("input", f"has {len(given)} items; at most {MAX_ITEMS} are allowed")
    return [_item(item, f"input[{index}]") for index, item in enumerate(given)]


def messages_of(items: Sequence[Item], instructions: str | None) -> list[dict[str, Any]]:
    """What a chat would have sent. Raises InvalidParameterError for an output without its call."""
    turns = _Turns()
    if instructions:
        turns.messages.append({"role": "system", "content": instructions})
    for item in items:
        turns.add(item)
    return turns.messages


# ---------------------------------------------------------------- items in their full form


def _item(item: Mapping[str, Any], where: str) -> Item:
    kind = item.get("type") or ("message" if "role" in item else None)
    match kind:
        case "message":
            return _message(item, where)
        case "function_call":
            return _call(item, where)
        case "function_call_output":
            return _output(item, where)
        case "reasoning":
            return _reasoning(item, where)
        case str():
            raise UnsupportedFeatureError(
                f"{where}.type is {kind[:64]!r}; supported: {', '.join(_SERVED)}",
                param=f"{where}.type",
            )
    raise _invalid(f"{where}.type", f"must be one of {', '.join(_SERVED)}")


def _message(item: Mapping[str, Any], where: str) -> Item:
    role = item.get("role")
    if role not in _ROLES:
        raise _invalid(f"{where}.role", f"must be one of {', '.join(_ROLES)}")
    kind = "output_text" if role == "assistant" else "input_text"
    texts = _texts(item.get("content"), f"{where}.content")
    return {
        "id": _own_id(item, "msg", where),
        "type": "message",
        "role": role,
        "status": "completed",
        "content": [_part(kind, text) for text in texts],
    }


def _part(kind: str, text: str) -> dict[str, Any]:
    more: dict[str, Any] = {"annotations": [], "logprobs": []} if kind == "output_text" else {}
    return {"type": kind, "text": text, **more}


def _call(item: Mapping[str, Any], where: str) -> Item:
    return {
        "id": _own_id(item, "fc", where),
        "type": "function_call",
        "status": "completed",
        "call_id": _text(item, "call_id", where),
        "name": _text(item, "name", where),
        "arguments": _text(item, "arguments", where, may_be_empty=True),
    }


def _output(item: Mapping[str, Any], where: str) -> Item:
    output = item.get("output")
    if not isinstance(output, str):
        output = "\n".join(_texts(output, f"{where}.output"))
    return {
        "id": _own_id(item, "fco", where),
        "type": "function_call_output",
        "status": "completed",
        "call_id": _text(item, "call_id", where),
        "output": output,
    }


def _reasoning(item: Mapping[str, Any], where: str) -> Item:
    full: Item = {"id": _own_id(item, "rs", where), "type": "reasoning", "summary": []}
    for field, kind in (("content", "reasoning_text"), ("summary", "summary_text")):
        parts = item.get(field) or []
        if not isinstance(parts, list):
            raise _invalid(f"{where}.{field}", "must be a list of texts")
        texts = [_reasoning_text(part, f"{where}.{field}[{i}]") for i, part in enumerate(parts)]
        full[field] = [{"type": kind, "text": text} for text in texts]
    return full


def _reasoning_text(part: Any, where: str) -> str:
    text = part.get("text") if isinstance(part, dict) else None
    if not isinstance(text, str):
        raise _invalid(where, 'must be an object with a "text"')
    return text


def _texts(content: Any, where: str) -> list[str]:
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise _invalid(where, "must be a text or a list of parts")
    return [_part_text(part, f"{where}[{index}]") for index, part in enumerate(content)]


def _part_text(part: Any, where: str) -> str:
    if not isinstance(part, dict):
        raise _invalid(where, "must be an object with type and text")
    kind = part.get("type")
    if kind not in (*_TEXT_PARTS, "refusal"):
        raise UnsupportedFeatureError(
            f"{where}.type is {str(kind)[:64]!r}; only text is served: 'input_text' and "
            "'output_text'",
            param=f"{where}.type",
        )
    field = "refusal" if kind == "refusal" else "text"
    if not isinstance(part.get(field), str):
        raise _invalid(f"{where}.{field}", "is required, a text")
    return str(part[field])


def _text(item: Mapping[str, Any], field: str, where: str, *, may_be_empty: bool = False) -> str:
    value = item.get(field)
    if not isinstance(value, str) or not (value or may_be_empty):
        raise _invalid(f"{where}.{field}", "is required, a text")
    return value


def _own_id(item: Mapping[str, Any], prefix: str, where: str) -> str:
    """The one that the item came with, or a new one."""
    own = item.get("id")
    if own is None:
        return new_id(prefix)
    if not isinstance(own, str) or not 0 < len(own) <= 128:
        raise _invalid(f"{where}.id", "must be a text of 1 to 128 characters")
    return own


# ---------------------------------------------------------------- messages


class _Turns:
    """Messages that grow item by item."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._turn: dict[str, Any] | None = None
        """The assistant's, as long as it goes on."""
        self._called: dict[str, str] = {}
        """Names of functions by the ids of their calls."""

    def add(self, item: Item) -> None:
        match item["type"]:
            case "reasoning":
                text = _joined(item.get("content") or item["summary"])
                self._begin()["reasoning_content"] = text
            case "function_call":
                self._add_call(item)
            case "function_call_output":
                self._add_output(item)
            case _ if item["role"] == "assistant":
                turn = self._turn
                if turn is None or turn["content"] is not None or "tool_calls" in turn:
                    turn = self._begin()
                turn["content"] = _joined(item["content"])
            case _:
                self._turn = None
                text = _joined(item["content"])
                self.messages.append({"role": item["role"], "content": text})

    def _begin(self) -> dict[str, Any]:
        self._turn = {"role": "assistant", "content": None}
        self.messages.append(self._turn)
        return self._turn

    def _add_call(self, item: Item) -> None:
        turn = self._turn or self._begin()
        function = {"name": item["name"], "arguments": item["arguments"]}
        call = {"id": item["call_id"], "type": "function", "function": function}
        turn.setdefault("tool_calls", []).append(call)
        self._called[item["call_id"]] = item["name"]

    def _add_output(self, item: Item) -> None:
        call_id = item["call_id"]
        if call_id not in self._called:
            raise _invalid(
                "input", f"has an output for the call {call_id[:64]!r}, but no such call"
            )
        self._turn = None
        self.messages.append(
            {
                "role": "tool",
                "tool_call_id": call_id,
                "name": self._called[call_id],
                "content": item["output"],
            }
        )


def _joined(parts: Iterable[Mapping[str, Any]]) -> str:
    return "\n".join(part["text"] for part in parts)


def _invalid(where: str, problem: str) -> InvalidParameterError:
    return InvalidParameterError(f"{where} {problem}", param=where)
