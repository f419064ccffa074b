"""config.pbtxt: what protobuf reads, and what a template left unfilled."""

import pytest

from loraplex.compat.triton.model_folder import (
    is_placeholder,
    parse_pbtxt,
    read_pbtxt,
    without_placeholders,
)
from loraplex.core.errors import ConfigError
from support.naming import naming

TEMPLATE = """\
name: "tensorrt_llm"
backend: "${triton_backend}"
max_batch_size: ${triton_max_batch_size}
model_transaction_policy { decoupled: ${decoupled_mode} }
dynamic_batching {
  preferred_batch_size: [ ${triton_max_batch_size} ]
  max_queue_delay_microseconds: 70
}
# a remark: ${here} "
output [ { name: "logits" data_type: ${logits_datatype} dims: [ -1 ] } ]
parameters: { key: "gpt_model_path" value: { string_value: "${engine_dir}" } }
"""


def test_what_was_not_filled_has_its_default() -> None:
    config = parse_pbtxt(TEMPLATE, "config.pbtxt")
    assert config.max_batch_size == 0
    assert not config.model_transaction_policy.decoupled
    assert list(config.dynamic_batching.preferred_batch_size) == []
    assert config.dynamic_batching.max_queue_delay_microseconds == 70
    assert config.output[0].data_type == 11, "TYPE_FP32"
    assert config.parameters["gpt_model_path"].string_value == "${engine_dir}"
    assert config.backend == "${triton_backend}"


def test_lines_stay_where_they_are() -> None:
    cleaned = without_placeholders(TEMPLATE)
    assert cleaned.count("\n") == TEMPLATE.count("\n")
    assert cleaned.splitlines()[8] == TEMPLATE.splitlines()[8], "remarks are left alone"
    split_field = "a { b:\n  ${x}\n c: 1 }"
    assert without_placeholders(split_field) == "a {   \n      \n c: 1 }"


@pytest.mark.parametrize("word", ["True", "true", "1", "t"])
def test_python_words_for_true(word: str) -> None:
    config = parse_pbtxt(f"model_transaction_policy {{ decoupled: {word} }}", "config.pbtxt")
    assert config.model_transaction_policy.decoupled


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\n\nmax_batch_sise: 3", ["line 3", "max_batch_sise", "did you mean max_batch_size"]),
        ("max_batch_size: 'a'", ["line 1", "integer"]),
        ("input [ { data_type: TYPE_FP31 } ]", ["line 1", "TYPE_FP31", "TYPE_FP32"]),
        ("input [ { data_type: whatever } ]", ["there are TYPE_INVALID", "TYPE_BF16"]),
        ("parameters {", ["a.pbtxt", "Expected"]),
        ("name: 'x", ["line 1"]),
    ],
)
def test_errors_name_the_place_and_what_would_be_right(text: str, expected: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_pbtxt(text, "a.pbtxt")
    for part in ["a.pbtxt", *expected]:
        assert part in str(caught.value)


def test_files_that_cannot_be_read(tmp_path) -> None:
    with pytest.raises(ConfigError, match=naming("none.pbtxt")):
        read_pbtxt(tmp_path / "none.pbtxt")
    (tmp_path / "latin.pbtxt").write_bytes(b"name: '\xe9'")
    with pytest.raises(ConfigError, match="UTF-8"):
        read_pbtxt(tmp_path / "latin.pbtxt")
    (tmp_path / "long.pbtxt").write_bytes(b"#" * (1 << 20) + b"#")
    with pytest.raises(ConfigError, match=naming(1048577, 1048576)):
        read_pbtxt(tmp_path / "long.pbtxt")


def test_placeholders() -> None:
    assert is_placeholder("${engine_dir}")
    assert is_placeholder(" ${engine_dir} ")
    assert not is_placeholder("/models/${name}")
    assert not is_placeholder("")
