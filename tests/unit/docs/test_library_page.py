"""The example of docs/library.md runs as it stands, with the shipped model and an adapter of it."""

import re
from pathlib import Path

from loraplex.demo import ADAPTER_PATHS, BASE_PATH

PAGE = Path(__file__).parents[3] / "docs" / "library.md"


def test_the_example_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    [example] = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    example = example.replace("path/to/model", str(BASE_PATH))
    example = example.replace("path/to/adapter", str(ADAPTER_PATHS["chinese"]))
    exec(compile(example, str(PAGE), "exec"), {"__name__": "example"})
    assert len(capsys.readouterr().out.splitlines()) == 4
