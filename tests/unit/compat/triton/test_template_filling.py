"""fill-template: which texts become which values, and which names are errors."""

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from loraplex.cli.main import app
from loraplex.compat.triton.tools import filled, parse_substitutions
from loraplex.core.errors import ConfigError
from support.naming import naming

POSTPROCESSING = (
    Path(__file__).parents[4]
    / "compat/tensorrtllm_backend/all_models/inflight_batcher_llm/postprocessing/config.pbtxt"
)
TEMPLATE = """max_batch_size: ${triton_max_batch_size}
decoupled: ${decoupled_mode}
queue: ${max_queue_size} ${max_queue_delay_microseconds}
ids: "${gpu_device_ids}" $plain $$5
"""


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a:1", {"a": "1"}),
        ("a:1,b:two", {"a": "1", "b": "two"}),
        ("a:", {"a": ""}),
        (r"gpu_device_ids:0\,1", {"gpu_device_ids": "0,1"}),
        (r"dir:c\:/x,b:1", {"dir": "c:/x", "b": "1"}),
        (r"a:one\\two", {"a": r"one\two"}),
        (r"a:one\two", {"a": r"one\two"}),
        (r"a:\\,b:2", {"a": "\\", "b": "2"}),
    ],
)
def test_substitutions(text: str, found: dict[str, str]) -> None:
    assert parse_substitutions(text) == found


@pytest.mark.parametrize("text", ["", "a", "a:1,", "a:1:2", "engine:s3://x", ":1", r"a\:1"])
def test_what_is_no_pair(text: str) -> None:
    with pytest.raises(ConfigError, match=naming("NAME:VALUE")):
        parse_substitutions(text)


def test_what_is_not_named_stays_but_for_the_queue() -> None:
    assert filled(TEMPLATE, {"decoupled_mode": "True"}, "t") == (
        "max_batch_size: ${triton_max_batch_size}\n"
        "decoupled: True\n"
        "queue: 0 0\n"
        'ids: "${gpu_device_ids}" $plain $5\n'
    )


def test_the_queue_may_be_named() -> None:
    assert "queue: 7 0\n" in filled(TEMPLATE, {"max_queue_size": "7"}, "t")


def test_a_name_without_braces() -> None:
    assert "x $5" in filled(TEMPLATE, {"plain": "x"}, "t")


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=naming("engine_dir", "decoupled_mode")):
        filled(TEMPLATE, {"engine_dir": "x"}, "t")


def test_the_queue_of_a_model_without_one() -> None:
    template = POSTPROCESSING.read_text()
    text = filled(template, {"tokenizer_dir": "/tokenizer", "max_queue_size": "0"}, "t")
    assert text == template.replace("${tokenizer_dir}", "/tokenizer")


class TestCommand:
    @pytest.fixture
    def template(self, tmp_path: Path) -> Path:
        path = tmp_path / "config.pbtxt"
        path.write_text(TEMPLATE)
        path.chmod(0o640)
        return path

    def test_to_the_screen(self, template: Path) -> None:
        result = CliRunner().invoke(app, ["fill-template", str(template), "decoupled_mode:True"])
        assert result.exit_code == 0
        assert result.stdout == filled(TEMPLATE, {"decoupled_mode": "True"}, "t")
        assert template.read_text() == TEMPLATE

    @pytest.mark.parametrize("flag", ["-i", "--in_place"])
    def test_in_place(self, template: Path, flag: str) -> None:
        words = ["fill-template", flag, str(template), "decoupled_mode:True"]
        result = CliRunner().invoke(app, words)
        assert (result.exit_code, result.stdout) == (0, "")
        assert "decoupled: True" in template.read_text()
        assert os.stat(template).st_mode & 0o777 == 0o640

    def test_an_error_changes_nothing(self, template: Path) -> None:
        result = CliRunner().invoke(app, ["fill-template", "-i", str(template), "nothing:1"])
        assert result.exit_code == 1
        assert template.read_text() == TEMPLATE
