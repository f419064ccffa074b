"""A model's family is found by its chat template, its markers by its tokenizer."""

import json
from pathlib import Path

import pytest

from loraplex.core.tools import (
    REASONING_PARSERS,
    TOOL_CALL_PARSERS,
    FunctionTool,
    ToolUse,
)
from loraplex.serving.text.chat_format import CompletionSyntax, chat_format
from loraplex.serving.text.detokenizer import IncrementalDetokenizer
from loraplex.serving.text.reasoning import TAGS
from loraplex.serving.text.tool_calls.formats import FORMATS, format_of_template
from loraplex.text.tokenizer import Tokenizer, load_tokenizer
from support import tiny_tokenizers

TEMPLATES = Path(__file__).parent / "chat_templates"

MARKERS = ["<|tool_call|>", "<think>", "</think>", "<|end|>"]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    """One that has markers among its special tokens."""
    tiny_tokenizers.write_byte_level(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text()) | {"additional_special_tokens": MARKERS}
    path.write_text(json.dumps(config))
    return load_tokenizer(tmp_path)


def test_the_settings_name_what_there_is() -> None:
    assert set(TOOL_CALL_PARSERS) == set(FORMATS)
    assert set(REASONING_PARSERS) == set(TAGS)


@pytest.mark.parametrize(
    ("template", "family", "reasoning"),
    [
        ("qwen-2.5", "hermes", "none"),
        ("qwen-3", "hermes", "think"),
        ("llama-3.1", "llama3_json", "none"),
        ("mistral-v3", "mistral", "none"),
        ("deepseek-r1", "deepseek_v3", "think"),
        ("phi-4-mini", "phi4_mini_json", "none"),
        ("granite-3", "granite", "none"),
        ("granite-4", "hermes", "none"),
        ("qwen-3.5", "qwen3_coder", "think"),
        ("nemotron-h", "nemotron_json", "think"),
        ("nemotron-3", "qwen3_coder", "think"),
        ("lfm2", "lfm2", "none"),
        ("lfm2.5", "lfm2", "think"),
        ("glm-4", "glm45", "think"),
        ("llama-2", "generic", "none"),
        ("chatml", "generic", "none"),
    ],
)
def test_families_of_templates(
    tokenizer: Tokenizer, template: str, family: str, reasoning: str
) -> None:
    found = chat_format((TEMPLATES / f"{template}.jinja").read_text(), tokenizer)
    assert (found.tool_calls, found.reasoning) == (family, reasoning)


@pytest.mark.parametrize(
    ("text", "family"),
    [
        ("<tool_call>\n<function=x>", "qwen3_coder"),
        ("<tool_call>{{ name }}<arg_key>", "glm45"),
        ("<|tool_call_begin|>", "kimi_k2"),
        ("<｜tool▁call▁begin｜>{{ name }}<｜tool▁sep｜>", "deepseek_v31"),
        ("[TOOL_CALLS]{{ name }}[ARGS]", "mistral_named"),
        ("[func_name1(params_name1=params_value1)]", "pythonic"),
        ("<|tool_call|>", "granite"),
        ("", "generic"),
    ],
)
def test_families_of_texts(text: str, family: str) -> None:
    assert format_of_template(text).name == family


def test_settings_go_before_the_template(tokenizer: Tokenizer) -> None:
    found = chat_format("<tool_call></think>", tokenizer, tool_calls="mistral", reasoning="none")
    assert (found.tool_calls, found.reasoning) == ("mistral", "none")


def test_markers_that_are_special_tokens_stay_in_the_text(tokenizer: Tokenizer) -> None:
    found = chat_format("<|tool_call|></think> tools", tokenizer)
    assert set(found.special_ids) == {"<|tool_call|>", "<think>", "</think>"}
    assert found.knows_tools
    assert not found.writes_calls
    without_tools, shown = found.shown_ids
    assert set(shown) == set(found.special_ids.values())
    assert len(without_tools) == 2

    text = '<think>Hm.</think><|tool_call|>[{"name": "f", "arguments": {"a": 1}}]<|end|>'
    ids = tokenizer.encode(text, add_special_tokens=False)
    tool_use = ToolUse(tools=(FunctionTool(name="f"),))
    reader = CompletionSyntax(chat_format=found, tool_use=tool_use).reader()
    detokenizer = IncrementalDetokenizer(tokenizer, shown_ids=shown)
    deltas = [reader.push(detokenizer.push([token_id])) for token_id in ids]
    deltas.append(reader.push(detokenizer.push([], final=True), final=True))
    assert "".join(delta.content for delta in deltas) == ""
    assert "".join(delta.reasoning for delta in deltas) == "Hm."
    calls = [call for delta in deltas for call in delta.calls]
    assert calls[0].name == "f"
    assert json.loads("".join(call.arguments for call in calls)) == {"a": 1}


def test_without_them_all_special_tokens_are_skipped(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<|tool_call|>a<|end|>", add_special_tokens=False)
    assert IncrementalDetokenizer(tokenizer).push(ids) == "a"
