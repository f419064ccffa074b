"""The families by name, and which one a chat template belongs to."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from loraplex.serving.text.tool_calls.families.deepseek import DeepSeek, DeepSeekBare
from loraplex.serving.text.tool_calls.families.generic import Generic
from loraplex.serving.text.tool_calls.families.glm import Glm
from loraplex.serving.text.tool_calls.families.granite import Granite
from loraplex.serving.text.tool_calls.families.hermes import Hermes
from loraplex.serving.text.tool_calls.families.kimi import Kimi
from loraplex.serving.text.tool_calls.families.lfm2 import Lfm2
from loraplex.serving.text.tool_calls.families.llama_json import LlamaJson
from loraplex.serving.text.tool_calls.families.mistral import Mistral, MistralNamed
from loraplex.serving.text.tool_calls.families.nemotron import Nemotron
from loraplex.serving.text.tool_calls.families.phi4 import Phi4
from loraplex.serving.text.tool_calls.families.pythonic import Pythonic
from loraplex.serving.text.tool_calls.families.qwen3_coder import Qwen3Coder
from loraplex.serving.text.tool_calls.format import ToolCallFormat

_BY_TEMPLATE: Final[tuple[ToolCallFormat, ...]] = (
    DeepSeekBare(),
    DeepSeek(),
    Kimi(),
    Lfm2(),
    Nemotron(),
    Glm(),
    Qwen3Coder(),
    Granite(),
    Hermes(),
    MistralNamed(),
    Mistral(),
    Phi4(),
    Pythonic(),
    LlamaJson(),
    Generic(),
)
"""A template belongs to the first that recognises it: markers that only one family has come first.
"""

FORMATS: Final[Mapping[str, ToolCallFormat]] = MappingProxyType(
    {call_format.name: call_format for call_format in _BY_TEMPLATE}
)


def format_of_template(template: str) -> ToolCallFormat:
    """The generic one if it is of no known family."""
    return next(known for known in _BY_TEMPLATE if known.recognises(template))
