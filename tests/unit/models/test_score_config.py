"""What a folder states of scores of pairs, and what of it is refused."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from loraplex.core.errors import ConfigError
from loraplex.core.score_format import (
    QWEN3_INSTRUCTION,
    QWEN3_RERANKER,
    PairTemplate,
    ScoreFormat,
    ScoreKind,
    sigmoid,
)
from loraplex.models.score_config import read_score_format


def modules(*names: str) -> list[dict[str, Any]]:
    return [
        {"idx": index, "name": str(index), "path": f"{index}_{name}", "type": f"a.b.{name}"}
        for index, name in enumerate(names)
    ]


def read(
    folder: Path,
    files: Mapping[str, Any],
    replacements: Mapping[str, Any] | None = None,
    **facts: Any,
) -> ScoreFormat:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(content))
    usual: dict[str, Any] = {"num_labels": 0, "generates": True, "renders": False}
    ids = {"no": [5], "yes": [6], "very long": [7, 8]}
    return read_score_format(folder, replacements or {}, ids.__getitem__, **(usual | facts))


JUDGE = {"modules.json": modules("Transformer", "LogitScore")}


def test_a_cross_encoder_whose_chat_template_makes_the_prompt(tmp_path: Path) -> None:
    files = {
        **JUDGE,
        "1_LogitScore/config.json": {"true_token_id": 9, "false_token_id": 4},
        "sentence_bert_config.json": {
            "processing_kwargs": {"chat_template": {"add_generation_prompt": True, "x": 1}}
        },
        "config_sentence_transformers.json": {
            "prompts": {"query": "find it"},
            "default_prompt_name": "query",
        },
    }
    assert read(tmp_path, files) == ScoreFormat(
        kind=ScoreKind.TOKENS,
        token_ids=(9, 4),
        renders=True,
        template_options={"add_generation_prompt": True, "x": 1},
        instruction="find it",
    )
    files["1_LogitScore/config.json"] = {"true_token_id": 9, "false_token_id": None}
    assert read(tmp_path, files).token_ids == (9,)
    files["modules.json"] = modules("Transformer", "Dense", "LogitScore")
    assert "Transformer, Dense, LogitScore" in read(tmp_path, files).problem


def test_fields_of_vllm_and_the_setting_that_replaces_them(tmp_path: Path) -> None:
    config = {"classifier_from_token": ["no", "yes"], "is_original_qwen3_reranker": True}
    expected = ScoreFormat(
        kind=ScoreKind.TOKENS,
        token_ids=(6, 5),
        template=PairTemplate.of(QWEN3_RERANKER),
        instruction=QWEN3_INSTRUCTION,
    )
    assert read(tmp_path, {"config.json": config}) == expected
    assert read(tmp_path, {"config.json": {}}, config) == expected
    one = {"classifier_from_token": ["yes"], "template": "{document}?{query}"}
    found = read(tmp_path, {"config.json": {}}, one, renders=True)
    assert (found.token_ids, found.renders) == ((6,), True)
    assert found.template == PairTemplate.of("{document}?{query}")


def test_heads_vectors_and_folders_that_state_nothing(tmp_path: Path) -> None:
    assert read(tmp_path, {}, num_labels=1, generates=False) == ScoreFormat()
    assert "3 labels" in read(tmp_path, {}, num_labels=3, generates=False).problem
    unknown = read(tmp_path, {})
    assert ("classifier_from_token" in unknown.problem, unknown.wants_head) == (True, True)
    assert read(tmp_path, {}, generates=False).kind is ScoreKind.VECTORS
    pooled = {"modules.json": modules("Transformer", "Pooling", "Normalize")}
    assert read(tmp_path, pooled) == ScoreFormat(kind=ScoreKind.VECTORS)


@pytest.mark.parametrize(
    ("fields", "is_probability", "problem"),
    [
        ({}, True, ""),
        (
            {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}},
            False,
            "",
        ),
        ({"sbert_ce_default_activation_function": "torch.nn.Sigmoid"}, True, ""),
        ({"sentence_transformers": {"activation_fn": "torch.nn.Tanh"}}, False, "Tanh"),
    ],
)
def test_activation_functions(
    tmp_path: Path, fields: dict[str, Any], is_probability: bool, problem: str
) -> None:
    found = read(tmp_path, {"config.json": fields}, num_labels=1)
    assert found.is_probability is is_probability
    assert problem in found.problem
    assert bool(problem) is bool(found.problem)
    assert not found.wants_head, "an adapter changes no function"


def test_the_activation_function_of_a_cross_encoder_of_version_6(tmp_path: Path) -> None:
    files = {"config_sentence_transformers.json": {"activation_fn": "torch.nn.Identity"}}
    assert not read(tmp_path, files, num_labels=1).is_probability


@pytest.mark.parametrize(
    ("replacements", "words"),
    [
        ({"tokens": ["yes"]}, "score_config has no 'tokens'"),
        ({"classifier_from_token": ["no", "yes", "no"]}, "two tokens"),
        ({"classifier_from_token": ["yes"], "method": "from_2_way_softmax"}, "two tokens"),
        ({"classifier_from_token": ["very long"]}, "is 2 tokens"),
        ({"classifier_from_token": "yes"}, "a list of strings"),
        ({"template": "{query}"}, "the document once"),
        ({"template": "{query}{document}{document}"}, "query, document, document"),
    ],
)
def test_refusals(tmp_path: Path, replacements: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read(tmp_path, {}, replacements)


def test_places_of_a_template_in_any_order() -> None:
    template = PairTemplate.of("a{document}b{query}c{instruction}d{query}e")
    assert template.around("{document}", "I") == ("a", "b{document}cId{document}e")
    assert template.takes_instruction
    assert not PairTemplate.of("{query}{document}").takes_instruction


def test_values_of_a_score() -> None:
    assert ScoreFormat().score([3.0, 1.0], is_raw=True) == 2.0
    assert ScoreFormat().score([0.0]) == 0.5
    assert ScoreFormat(is_probability=False).score([3.0]) == 3.0
    assert sigmoid(-1000.0) == 0.0
    assert sigmoid(1000.0) == 1.0
    assert sigmoid(-2.0) == pytest.approx(1 - sigmoid(2.0))
