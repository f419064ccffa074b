"""What a folder states of vectors, and what of it is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from loraplex.core.errors import ConfigError, InvalidParameterError, UnsupportedFeatureError
from loraplex.core.task import Pool, PoolKind
from loraplex.core.vector_format import TextPrompts, VectorFormat
from loraplex.models.sentence_transformers import read_vector_format, read_vector_layers
from loraplex.models.spec import VectorLayerSpec

OLD = "sentence_transformers.models."


def folder_with(tmp_path: Path, files: dict[str, Any]) -> Path:
    for name, content in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return tmp_path


def modules(*names: str) -> list[dict[str, Any]]:
    return [
        {"idx": index, "name": str(index), "path": f"{index}_{name}", "type": OLD + name}
        for index, name in enumerate(names)
    ]


USUAL = modules("Transformer", "Pooling", "Normalize")


def test_a_folder_that_says_nothing_is_a_decoder(tmp_path: Path) -> None:
    assert read_vector_format(tmp_path) == VectorFormat()
    assert VectorFormat().pool() == Pool(PoolKind.LAST, normalize=True)


@pytest.mark.parametrize(
    ("pooling", "kind"),
    [
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, PoolKind.LAST),
        ({}, PoolKind.MEAN),
        (
            {"pooling_mode_weightedmean_tokens": True, "pooling_mode_mean_tokens": False},
            PoolKind.WEIGHTED_MEAN,
        ),
        ({"pooling_mode": "cls"}, PoolKind.CLS),
        ({"pooling_mode": ["lasttoken"], "pooling_mode_mean_tokens": True}, PoolKind.LAST),
    ],
)
def test_old_and_new_files_of_the_pooling(
    tmp_path: Path, pooling: dict[str, Any], kind: PoolKind
) -> None:
    # The order is that of idx, not of the file.
    files = {"modules.json": USUAL[::-1], "1_Pooling/config.json": pooling}
    found = read_vector_format(folder_with(tmp_path, files))
    assert (found.kind, found.normalizes, found.problem) == (kind, True, "")


def test_prompts_dimensions_and_lengths(tmp_path: Path) -> None:
    files = {
        "config.json": {"matryoshka_dimensions": [8, 16]},
        "modules.json": USUAL[:2],
        "1_Pooling/config.json": {"pooling_mode": "lasttoken", "include_prompt": False},
        "config_sentence_transformers.json": {
            "prompts": {"query": "Q: ", "document": ""},
            "default_prompt_name": "query",
        },
        "sentence_bert_config.json": {"max_seq_length": 12, "do_lower_case": False},
    }
    found = read_vector_format(folder_with(tmp_path, files))
    assert found.problem == "", "the last token is none of the prompt's"
    assert [found.prompt(name) for name in (None, "query", "document")] == ["Q: ", "Q: ", ""]
    assert found.max_tokens == 12
    assert found.pool() == Pool(normalize=False)
    assert found.pool(dimensions=8) == Pool(dimensions=8, normalize=True)
    assert found.pool(dimensions=8, normalize=False) == Pool(dimensions=8, normalize=False)
    with pytest.raises(InvalidParameterError, match=r"one of 8, 16, got 9") as dimensions:
        found.pool(dimensions=9)
    assert dimensions.value.param == "dimensions"
    with pytest.raises(InvalidParameterError, match="known: query, document"):
        found.prompt("passage")
    assert found.prompts == TextPrompts({"query": "Q: ", "document": ""}, "query")


DENSE = modules("Transformer", "Pooling", "Dense", "Normalize")
IDENTITY = "torch.nn.modules.linear.Identity"


def test_dense_modules_follow_the_pooling(tmp_path: Path) -> None:
    files = {
        "modules.json": modules("Transformer", "Pooling", "Dense", "Dense"),
        "1_Pooling/config.json": {"pooling_mode": "mean"},
        "2_Dense/config.json": {
            "in_features": 8,
            "out_features": 24,
            "bias": False,
            "activation_function": IDENTITY,
        },
        "3_Dense/config.json": {"in_features": 24, "out_features": 6, "use_residual": False},
    }
    folder = folder_with(tmp_path, files)
    assert read_vector_format(folder).pool() == Pool(PoolKind.MEAN, normalize=False)
    first, second = read_vector_layers(folder, 8)
    assert first == VectorLayerSpec(
        folder="2_Dense", in_features=8, out_features=24, has_bias=False, has_tanh=False
    )
    assert second == VectorLayerSpec(
        folder="3_Dense", in_features=24, out_features=6, has_bias=True, has_tanh=True
    )
    assert (first.num_bytes, second.num_bytes) == (4 * 8 * 24, 4 * (24 * 6 + 6))
    with pytest.raises(ConfigError, match=r"in_features is 8, but .* 16 values"):
        read_vector_layers(folder, 16)


@pytest.mark.parametrize("field", ["pooling", "mean"])
def test_the_pooling_of_a_folder_with_config_json_alone(tmp_path: Path, field: str) -> None:
    """Llama in both directions states it there; other fields of this name mean nothing."""
    pooling: Any = "avg" if field == "pooling" else {"type": "avg"}
    found = read_vector_format(folder_with(tmp_path, {"config.json": {"pooling": pooling}}))
    assert found.kind is (PoolKind.MEAN if field == "pooling" else PoolKind.LAST)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"modules.json": modules("Transformer", "Dense", "Pooling")}, "order"),
        (
            {"modules.json": modules("Transformer", "Pooling", "Normalize", "Dense")},
            "order",
        ),
        *(
            (
                {
                    "modules.json": DENSE,
                    "1_Pooling/config.json": {},
                    "2_Dense/config.json": {"in_features": 8, "out_features": 8} | change,
                },
                words,
            )
            for change, words in (
                ({"activation_function": "torch.nn.modules.activation.GELU"}, r"GELU of 2_Dense"),
                ({"use_residual": True}, "use_residual"),
                ({"module_input_name": "token_embeddings"}, "module_input_name"),
            )
        ),
        ({"modules.json": modules("Transformer", "LogitScore")}, "LogitScore"),
        ({"modules.json": modules("Transformer")}, "order"),
        ({"modules.json": modules("Transformer", "Normalize", "Pooling")}, "order"),
        (
            {"modules.json": USUAL, "1_Pooling/config.json": {"pooling_mode": ["mean", "cls"]}},
            "joins 2 kinds",
        ),
        (
            {"modules.json": USUAL, "1_Pooling/config.json": {"pooling_mode_max_tokens": True}},
            "mean, max",
        ),
        ({"modules.json": USUAL, "1_Pooling/config.json": {"pooling_mode": "max"}}, "kind max"),
        ({"sentence_bert_config.json": {"do_lower_case": True}}, "do_lower_case"),
        (
            {"sentence_bert_config.json": {"modality_config": {"text": {}, "message": {}}}},
            "modality_config",
        ),
    ],
)
def test_what_is_not_computed_is_refused_by_name(
    tmp_path: Path, files: dict[str, Any], words: str
) -> None:
    found = read_vector_format(folder_with(tmp_path, files))
    with pytest.raises(UnsupportedFeatureError, match=words):
        found.pool()


@pytest.mark.parametrize(
    "files",
    [
        {"modules.json": "{"},
        {"modules.json": []},
        {"modules.json": [{"idx": 0}]},
        {"modules.json": [{"idx": 0, "type": "Transformer", "path": "../other"}]},
        {"modules.json": USUAL, "1_Pooling/config.json": {"pooling_mode": 3}},
        {"config_sentence_transformers.json": {"default_prompt_name": "query"}},
        {"config_sentence_transformers.json": {"prompts": {"query": 1}}},
        {"config.json": {"matryoshka_dimensions": "8"}},
        {"modules.json": DENSE},
    ],
)
def test_broken_files(tmp_path: Path, files: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        read_vector_format(folder_with(tmp_path, files))


@pytest.mark.parametrize("place", ["1_Pooling\0", "\n", "/tmp", "../1_Pooling", "a/../../b"])
def test_paths_that_are_no_folders_within_are_refused(tmp_path: Path, place: str) -> None:
    listed = [*USUAL[:1], {**USUAL[1], "path": place}, *USUAL[2:]]
    folder = folder_with(tmp_path, {"modules.json": listed})
    with pytest.raises(ConfigError, match="within its own"):
        read_vector_format(folder)


def test_a_pooling_without_its_file_is_refused(tmp_path: Path) -> None:
    """sentence-transformers reads it, too; the default kind may be another."""
    with pytest.raises(ConfigError, match="1_Pooling"):
        read_vector_format(folder_with(tmp_path, {"modules.json": USUAL}))
