import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from loraplex.bench.report import Report
from loraplex.cli.main import app
from loraplex.core.errors import QueueFullError
from support.naming import naming

ROOT = Path(__file__).parents[3]
QUICK = ["--load", "closed:2", "--requests", "4", "--repeats", "1", "--output-tokens", "3"]


def bench(*arguments: str):
    return CliRunner().invoke(app, ["bench", *arguments])


def test_measures_a_running_server_and_writes_a_report(url, tmp_path):
    result = bench("--url", url, *QUICK, "--popularity", "zipf:1.5", "--output", str(tmp_path))
    assert result.exit_code == 0, result.output
    assert "tok/s to base" in result.stdout
    [path] = tmp_path.glob("*.json")
    report = msgspec.json.decode(path.read_bytes(), type=Report)
    assert str(path) in result.stdout
    assert report.settings.num_adapters == 3
    assert [str(r.workload.popularity) for r in report.results] == ["base", "zipf:1.5"]
    assert report.num_failed == 0


def test_a_failed_request_is_the_exit_code(url, backend):
    backend.plant(QueueFullError("no room"))
    result = bench("--url", url, *QUICK, "--adapters", "0")
    # The first pass is for warming up: what fails there does not count.
    assert result.exit_code == 0
    for _ in range(8):
        backend.plant(QueueFullError("no room"))
    result = bench("--url", url, *QUICK, "--adapters", "0")
    assert result.exit_code == 1
    assert "4 requests FAILED" in result.stdout
    assert "no room" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--load", "often"], ("often",)),
        (["--popularity", "zipf"], ("popularity", "zipf")),
        (["--prompt-tokens", "8-4"], ("8-4",)),
        (["--url", "http://127.0.0.1:9", "--model", "folder"], ("--model", 1, "--url")),
        (["--url", "http://127.0.0.1:9", "--", "--dtype", "float32"], (1, "--url")),
        (
            ["--url", "http://127.0.0.1:9"],
            ("http://127.0.0.1:9", "[Connect call failed ('127.0.0.1', 9)]"),
        ),
        (["--model", "no/such/folder"], ("no/such/folder", 1)),
    ],
)
def test_a_bad_argument_is_one_line(arguments, named):
    result = bench(*arguments)
    assert result.exit_code == 1
    assert re.search(naming(*named), result.stderr)
    assert "Traceback" not in result.stderr


def test_without_aiohttp_it_says_what_to_install(monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "aiohttp" else find_spec(name)
    )
    result = bench("--url", "http://127.0.0.1:9")
    assert result.exit_code == 1
    assert re.search(naming("loraplex[bench]", 1), result.stderr)


def test_a_server_is_installed_without_aiohttp():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert not [text for text in project["dependencies"] if text.startswith("aiohttp")]
    assert [text for text in project["optional-dependencies"]["bench"] if "aiohttp" in text]


def test_the_other_commands_need_none_of_it():
    packages = "{'aiohttp', 'httpx', 'safetensors'}"
    code = f"import sys, loraplex.cli.main; print({packages} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_without_a_verb_it_runs(url):
    plain = bench("--url", url, *QUICK)
    named = bench("run", "--url", url, *QUICK)
    assert plain.exit_code == named.exit_code == 0
    assert "run" in bench("--help").stdout


@pytest.mark.slow
def test_starts_a_server_of_its_own(tmp_path):
    result = bench(*QUICK, "--adapters", "2", "--output", str(tmp_path), "--", "--num-threads", "1")
    assert result.exit_code == 0, result.output
    [path] = tmp_path.glob("*.json")
    report = msgspec.json.decode(path.read_bytes(), type=Report)
    assert report.served.url is None
    assert report.served.serve_flags == ("--num-threads", "1")
    assert [str(r.workload.popularity) for r in report.results] == ["base", "identical", "distinct"]
    assert all(result.median.num_cached_tokens == 0 for result in report.results)
