"""Functions that a completion may call, independent of the protocol that defines them."""

import enum
from typing import Any, Final

import msgspec

TOOL_CALL_PARSERS: Final = (
    "generic", "hermes", "llama3_json", "pythonic", "mistral", "mistral_named", "deepseek_v3",
    "deepseek_v31", "phi4_mini_json", "granite", "qwen3_coder", "glm45", "kimi_k2", "lfm2",
    "nemotron_json",
)  # fmt: skip
"""Formats of tool calls, as settings name them."""

REASONING_PARSERS: Final = ("think", "mistral")
"""Formats of reasoning, as settings name them."""


class FunctionTool(msgspec.Struct, frozen=True, kw_only=True):
    """One function, as the client describes it."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = {}
    """JSON schema of the arguments, which are an object; empty: any."""
    is_strict: bool = False
    """Whether a call's arguments must match the schema, also if the model decides to call."""


class ToolMode(enum.StrEnum):
    AUTO = "auto"
    """The model decides whether it calls a function."""
    REQUIRED = "required"
    """The model must call a function at least once."""


class ToolUse(msgspec.Struct, frozen=True, kw_only=True):
    """Functions that one completion may call, and whether it must."""

    tools: tuple[FunctionTool, ...]
    """Functions that may be called: at least one, and no two with one name."""
    mode: ToolMode = ToolMode.AUTO
    is_parallel: bool = True
    """Whether one completion may have several calls."""
    is_restricted: bool = False
    """Whether the prompt includes other tools, too."""
    is_named: bool = False
    """Whether the client named the one function: OpenAI's finish reason is then `stop`."""

    @property
    def needs_grammar(self) -> bool:
        """Whether unconstrained text could violate the request."""
        return (
            self.mode is ToolMode.REQUIRED
            or not self.is_parallel
            or self.is_restricted
            or any(tool.is_strict for tool in self.tools)
        )


class CallDelta(msgspec.Struct, frozen=True, kw_only=True):
    """Part of one call: name and id once, at its beginning, then pieces of the arguments."""

    index: int
    """Index of the call in its completion."""
    call_id: str | None = None
    name: str | None = None
    arguments: str = ""
    """Piece of a JSON text, which is that of an object unless a limit cut the completion."""
