"""The command of the comparison: its flags, its errors, and loraplex compared with itself."""

import importlib.util
import re

import compare
import msgspec
import pytest
import typer
from comparison.loraplex_system import LoraplexLibrary, LoraplexServer
from comparison.shapes import LLAMA_8B, SHAPES, TINY
from typer.testing import CliRunner

from loraplex.core.errors import ConfigError
from support.naming import naming


def run_compare(*arguments: str):
    command = typer.Typer(add_completion=False)
    command.command()(compare.compare)
    return CliRunner().invoke(command, [*arguments])


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--model", "huge"], ("huge",)),
        (["--workloads", "W1,W9"], ("W9", "W1")),
        (["--workloads", ","], ("','",)),
        (["--weights", "4"], (4, "--weights")),
        (["--peer", "vllm"], ("NAME=PATH", "--peer", "vllm")),
        (["--peer", "unheard-of=/"], ("llama.cpp",)),
        (["--only", "nobody"], ("fp32", "--only")),
        (["--model", "llama-3.1-8b", "--weights", "8"], ("llama-3.1-8b", "--weights")),
        (["--model", "qwen2.5-1.5b", "--workloads", "W6"], ("W6", "held")),
    ],
)
def test_a_bad_comparison_is_one_line(tmp_path, arguments, named):
    result = run_compare(str(tmp_path / "out"), *arguments)
    assert result.exit_code == 1
    assert re.search(naming(*named), result.stderr)
    assert not [*tmp_path.iterdir()]


def test_a_comparison_needs_the_extra(monkeypatch, tmp_path):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find_spec(name)
    )
    result = run_compare(str(tmp_path / "out"))
    assert result.exit_code == 1
    assert re.search(naming("matplotlib", "loraplex[bench]"), result.stderr)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_compares_loraplex_with_itself(monkeypatch, tmp_path):
    """One layer will do: the systems, the journal and the report are the same."""
    monkeypatch.setitem(SHAPES, "tiny", msgspec.structs.replace(TINY, num_layers=1))
    out = tmp_path / "out"
    arguments = ["--weights", "32,16", "--workloads", "W2-32,W3-32", "--rounds", "1"]
    result = run_compare(str(out), *arguments, "--fixtures", str(tmp_path / "fixtures"))
    assert result.exit_code == 0, result.output
    assert result.stdout.count("right; 30 of 30") == 4
    assert "W3-32 is" in result.stdout
    assert "Not measured" not in result.stdout
    assert (tmp_path / "out-throughput.svg").stat().st_size > 1000
    again = run_compare(str(out), *arguments, "--fixtures", str(tmp_path / "fixtures"))
    assert again.stdout == result.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_compares_loraplex_on_a_large_models_way(monkeypatch, tmp_path):
    """Use a small shape: restarts, the three starts, the short check and the summary."""
    shape = msgspec.structs.replace(
        LLAMA_8B,
        hidden_size=512,
        num_layers=2,
        num_heads=8,
        num_kv_heads=4,
        ffn_size=1024,
        vocab_size=32000,
    )
    monkeypatch.setitem(SHAPES, shape.name, shape)
    arguments = ["--model", shape.name, "--weights", "gguf:Q4_K_M", "--rounds", "1"]
    arguments += ["--workloads", "W1,W2,W3,W4,held", "--fixtures", str(tmp_path / "fixtures")]
    result = run_compare(str(tmp_path / "out"), *arguments)
    assert result.exit_code == 0, result.output
    assert "estimated minutes" in result.stderr
    assert result.stdout.count("(standard): right") == 1
    assert "Not measured" not in result.stdout
    assert "## Summary" in result.stdout
    for kind in ("first", "cold", "warm"):
        assert result.stdout.count(f"(standard, {kind}): ready in") == 1
    assert "library" not in result.stdout  # no peer is one
    assert "Streams held" in result.stdout


def test_a_gguf_file_needs_its_maker():
    weights = ("32-bit", "16-bit", "8-bit")
    assert [LoraplexServer.with_weights(each, []).name for each in weights] == [
        *("loraplex fp32", "loraplex bf16", "loraplex int8")
    ]
    assert LoraplexLibrary.with_weights("8-bit", []).name == "loraplex int8, library"
    with pytest.raises(ConfigError, match=naming("gguf:Q4_0", "--peer")):
        LoraplexServer.with_weights("gguf:Q4_0", [])
