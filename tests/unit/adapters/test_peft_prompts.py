"""Prompts in a PEFT folder: what is read, and what is left out with a warning."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from loraplex.adapters.formats.peft_ends import END_FILES, read_prompts
from loraplex.core.vector_format import PROMPTS_FILE, TextPrompts
from support.naming import naming

MAX_BYTES = 1 << 20


def read(folder: Path, content: Any) -> tuple[TextPrompts | None, list[str]]:
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / PROMPTS_FILE).write_text(text)
    return read_prompts(folder, MAX_BYTES)


def test_what_sentence_transformers_saves(tmp_path: Path) -> None:
    assert read_prompts(tmp_path, MAX_BYTES) == (None, [])
    texts = {"query": "Q: ", "document": ""}
    content = {"prompts": texts, "default_prompt_name": "query", "similarity_fn_name": "cosine"}
    assert read(tmp_path, content) == (TextPrompts(texts, "query"), [])
    assert read(tmp_path, {"prompts": texts, "default_prompt_name": None})[0] == TextPrompts(texts)
    assert read(tmp_path, {}) == (TextPrompts(), [])
    assert PROMPTS_FILE in END_FILES, "a change of it is a change of the folder"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", ("JSON",)),
        ("[]", ("object",)),
        ({"prompts": ["a"]}, ("prompts", 64)),
        ({"prompts": {"query": 3}}, ("prompts", 10_000)),
        ({"prompts": {"query": "x" * 10_001}}, ("prompts", 10_000)),
        ({"prompts": {str(number): "" for number in range(65)}}, ("prompts", 64)),
        ({"prompts": {}, "default_prompt_name": "query"}, ("default_prompt_name", "query")),
        ({"prompts": {}, "default_prompt_name": ["query"]}, ("default_prompt_name", "query")),
        ("x" * (MAX_BYTES + 1), ("base model",)),
    ],
)
def test_a_file_that_is_left_out_is_a_warning(
    tmp_path: Path, content: Any, words: tuple[object, ...]
) -> None:
    prompts, warnings = read(tmp_path, content)
    assert prompts is None
    [warning] = warnings
    assert re.search(naming(PROMPTS_FILE, *words), warning), warning
