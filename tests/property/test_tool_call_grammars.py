"""Whatever a grammar of tool calls lets a model write is read as calls with right arguments."""

import json
import random

import llguidance
import pytest

from loraplex.core.tools import FunctionTool, ToolMode, ToolUse
from loraplex.serving.grammar.check import GrammarCheck, SpecialTokens
from loraplex.serving.text.chat_format import ChatFormat, CompletionSyntax, completion_grammar
from loraplex.serving.text.tool_calls.formats import FORMATS

PARAMETERS = {
    "type": "object",
    "properties": {
        "room": {"type": "string", "enum": ["kitchen", "bath </x>", 'a "b"']},
        "level": {"type": "integer", "minimum": -5, "maximum": 99},
        "blinks": {"type": "boolean"},
        "spots": {"type": "array", "items": {"enum": [1, 2.5, None]}, "maxItems": 3},
        "mode": {"$ref": "#/$defs/mode"},
    },
    "$defs": {"mode": {"type": "object", "properties": {"x": {"const": "y"}},
                       "required": ["x"], "additionalProperties": False}},
    "required": ["room", "mode"],
    "additionalProperties": False,
}  # fmt: skip
TOOLS = (
    FunctionTool(name="set_light", parameters=PARAMETERS),
    FunctionTool(name="stop", parameters={"properties": {}, "additionalProperties": False}),
)
MAX_TOKENS = 3000


def is_right(name: str, arguments: dict[str, object]) -> bool:
    if name == "stop":
        return arguments == {}
    return (
        name == "set_light"
        and {"room", "mode"} <= set(arguments) <= set(PARAMETERS["properties"])
        and arguments["room"] in ("kitchen", "bath </x>", 'a "b"')
        and arguments["mode"] == {"x": "y"}
        and arguments.get("level", 0) in range(-5, 100)
        and isinstance(arguments.get("blinks", True), bool)
        and all(spot in (1, 2.5, None) for spot in arguments.get("spots", []))
    )


def written(
    grammar_text: str, vocabulary: SpecialTokens, tokenizer: llguidance.LLTokenizer, seed: int
) -> str:
    """A text that the grammar lets through, by draws."""
    source = random.Random(seed)
    matcher = llguidance.LLMatcher(tokenizer, grammar_text)
    tokens: list[int] = []
    for _ in range(MAX_TOKENS):
        mask = matcher.compute_bitmask()
        allowed = [i for i in range(len(vocabulary.tokens)) if mask[i // 8] >> (i % 8) & 1]
        token = source.choice(allowed)
        if token == vocabulary.eos_token_id:
            return b"".join(vocabulary.tokens[i] for i in tokens).decode()
        assert matcher.consume_token(token)
        tokens.append(token)
    pytest.fail("the text has no end")


@pytest.mark.some(10)
@pytest.mark.parametrize("is_special", [False, True])
@pytest.mark.parametrize("family", FORMATS)
def test_what_the_grammar_lets_through_is_calls(family: str, is_special: bool) -> None:
    markers = FORMATS[family].markers if is_special else ()
    special_ids = {marker: 300 + index for index, marker in enumerate(markers)}
    reading = CompletionSyntax(
        chat_format=ChatFormat(tool_calls=family, special_ids=special_ids),
        tool_use=ToolUse(tools=TOOLS, mode=ToolMode.REQUIRED),
    )
    vocabulary = SpecialTokens({i: marker.encode() for marker, i in special_ids.items()}, 400)
    grammar = completion_grammar(reading, None)
    assert grammar is not None
    compiled = GrammarCheck(vocabulary).compiled(grammar).text
    tokenizer = llguidance.LLTokenizer(vocabulary, slices=[])  # type: ignore[arg-type]
    for seed in range(12):
        text = written(compiled, vocabulary, tokenizer, seed)
        reader = reading.reader()
        found = reader.push(text, final=True)
        assert found.content == "", text
        assert found.calls
        for call in found.calls:
            assert is_right(call.name or "", json.loads(call.arguments)), text
