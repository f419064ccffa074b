"""The functions that an answer may call, free of the protocol that named them."""

import enum
from typing import Any, Final

import msgspec

TOOL_CALL_PARSERS: Final = (
    "generic", "hermes", "llama3_json", "pythonic", "mistral", "mistral_named", "deepseek_v3",
    "deepseek_v31", "phi4_mini_json", "granite", "qwen3_coder", "glm45", "kimi_k2",
)  # fmt: skip
"""The families by which calls are told from text, as settings name them."""

REASONING_PARSERS: Final = ("think", "mistral")
"""The tags by which reasoning is."""


class FunctionTool(msgspec.Struct, frozen=True, kw_only=True):
    """One function, as its client described it."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = {}
    """A JSON schema of the arguments, which are an object; empty: any."""
    is_strict: bool = False
    """A call's arguments must match, whoever decides that it is called."""


class ToolMode(enum.StrEnum):
    AUTO = "auto"
    """The model decides whether it calls."""
    REQUIRED = "required"
    """It has to call at least once."""


class ToolUse(msgspec.Struct, frozen=True, kw_only=True):
    """Which functions one answer may call, and whether it must."""

    tools: tuple[FunctionTool, ...]
    """Those that may be called: at least one, and no two of a name."""
    mode: ToolMode = ToolMode.AUTO
    is_parallel: bool = True
    """More than one call in one answer."""
    is_restricted: bool = False
    """The prompt shows other tools, too."""
    is_named: bool = False
    """The client named the one function: OpenAI then ends the answer with `stop`."""

    @property
    def needs_grammar(self) -> bool:
        """The text alone could break what was asked for."""
        return (
            self.mode is ToolMode.REQUIRED
            or not self.is_parallel
            or self.is_restricted
            or any(tool.is_strict for tool in self.tools)
        )


class CallDelta(msgspec.Struct, frozen=True, kw_only=True):
    """A part of one call: its name and id once, at its beginning, then pieces of its arguments."""

    index: int
    """Of the call in its answer."""
    call_id: str | None = None
    name: str | None = None
    arguments: str = ""
    """They add up to a JSON text, unless the answer was cut or the model broke it."""
