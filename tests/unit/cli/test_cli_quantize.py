"""`loraplex quantize` over the capitals model."""

import json
import re
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from loraplex.cli.main import app
from loraplex.cli.quantize import verdict
from loraplex.demo import BASE_PATH
from loraplex.execution.quantizing.report import LayerError, QuantizeReport
from loraplex.execution.quantizing.rounding import WeightError
from support.naming import naming


def quantize(output: Path, *arguments: str, model: Path = BASE_PATH) -> Result:
    return CliRunner().invoke(app, ["quantize", str(model), *arguments, str(output)])


def test_the_report(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    result = quantize(tmp_path / "output", "--to", "int8", "--report", str(file))
    assert result.exit_code == 0, result.output
    rows = re.findall(
        r"^(model\.layers\.\S+) +(\d+) x (\d+) +all +([\d.]+)% +-$", result.stdout, re.M
    )
    report = json.loads(file.read_text())
    assert len(rows) == len(report["layers"]) == 28
    for (name, *shape, error), layer in zip(rows, report["layers"], strict=True):
        assert (name, list(map(int, shape))) == (layer["name"], layer["shape"])
        assert float(error) == pytest.approx(100 * layer["weight_error"], abs=1e-3)
    assert 0.004 < report["total"]["weight_error"] < 0.01
    assert report["written_bytes"] < 0.62 * report["source_bytes"]
    assert "no texts: each weight is rounded by itself" in result.stdout
    assert result.stdout.splitlines()[-1].startswith("verdict: usual errors for int8")


def test_texts_of_each_kind(tmp_path: Path) -> None:
    paragraphs, lines = tmp_path / "texts.txt", tmp_path / "texts.jsonl"
    paragraphs.write_text("The capital of France.\nIt is large.\n\n\n\nAnother text.\n")
    messages = [{"role": "user", "content": "The capital of France?"}]
    lines.write_text(
        json.dumps({"text": "The capital"}) + "\n\n" + json.dumps({"messages": messages}) + "\n"
    )
    for file in (paragraphs, lines):
        output = tmp_path / f"from{file.suffix}"
        result = quantize(output, "--to", "int4", "--calibrate", str(file))
        assert result.exit_code == 0, result.output
        assert re.search(rf"2 texts with \d+ tokens of {re.escape(str(file))}", result.stdout)
        assert re.search(r"^all +[\d.]+% +[\d.]+%$", result.stdout, re.M)


def test_no_more_tokens_than_wanted(tmp_path: Path) -> None:
    file = tmp_path / "texts.txt"
    file.write_text("The capital of France is.\n\n" * 50)
    arguments = ("--to", "int8", "--calibrate", str(file), "--calibrate-tokens", "20")
    result = quantize(tmp_path / "output", *arguments)
    assert " with 20 tokens of " in result.stdout


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("\n \n", ("texts.jsonl",)),
        ('{"txt": "x"}', (1, '{"text": "..."}', '{"messages": [...]}')),
        ("[1]", (1, "object", "array")),
        ('{"text": "x"}\n{"messages": [{"role": 3}]}', (2, 3, "messages[0].role")),
    ],
)
def test_files_that_hold_no_texts(content: str, named: tuple[object, ...], tmp_path: Path) -> None:
    file = tmp_path / "texts.jsonl"
    file.write_text(content)
    result = quantize(tmp_path / "output", "--to", "int4", "--calibrate", str(file))
    assert result.exit_code == 1
    assert re.search(naming(*named), result.stderr)
    assert not (tmp_path / "output").exists()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (
            ("--group-size", "48"),
            ("--group-size", 0, 16, 32, 64, 128, 256, 512, "got", 48),
        ),
        (("--max-shard-size", "big"), ("--max-shard-size", "big")),
        (("--max-shard-size", "0"), ("--max-shard-size", 0)),
        (("--calibrate", "/nowhere.txt"), ("/nowhere.txt",)),
    ],
)
def test_arguments_that_are_refused(
    arguments: tuple[str, ...], named: tuple[object, ...], tmp_path: Path
) -> None:
    result = quantize(tmp_path / "output", "--to", "int4", *arguments)
    assert result.exit_code == 1
    assert re.search(naming(*named), result.stderr)


def test_a_copy_is_not_quantised_once_more(tmp_path: Path) -> None:
    quantize(tmp_path / "once", "--to", "int8")
    result = quantize(tmp_path / "twice", "--to", "int4", model=tmp_path / "once")
    assert result.exit_code == 1
    assert re.search(naming("compressed-tensors"), result.stderr)


@pytest.mark.parametrize(
    ("bits", "error", "is_calibrated", "text"),
    [
        (8, 0.007, False, "usual errors for int8. Evaluate"),
        (
            8,
            0.03,
            False,
            "large errors for int8, the largest in b: outputs will differ. Use a smal",
        ),
        (4, 0.09, False, "usual errors for int4; --calibrate FILE makes"),
        (4, 0.09, True, "usual errors for int4. Evaluate"),
        (4, 0.3, True, "Use --to int8 or a smaller --group-size"),
        (4, 0.3, False, "--calibrate FILE"),
    ],
)
def test_the_verdict(bits: int, error: float, is_calibrated: bool, text: str) -> None:
    layers = [
        LayerError(name, (1, 1), None, WeightError((scale * error) ** 2, 1.0))
        for name, scale in (("a", 0.5), ("b", 1.3))
    ]
    report = QuantizeReport(layers, 1, 1)
    assert text in verdict(report, bits, is_calibrated=is_calibrated)
