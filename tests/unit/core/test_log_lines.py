import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from loraplex.core.environment import has_colours
from support.naming import naming

PROGRAM = """
import logging
from loraplex.core.log_lines import log_to_standard_error

log_to_standard_error("warning", *{arguments})
logging.getLogger("a.b").info("not reported")
logging.getLogger("a.b").warning("reported")
"""


def line(*arguments: str) -> str:
    program = PROGRAM.format(arguments=arguments)
    run = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=60
    )
    assert not run.stdout
    return run.stderr


def test_a_line_has_level_time_source_and_message():
    start = r"W \d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} "
    assert re.fullmatch(start + "a.b: reported\n", line())
    assert re.fullmatch(start + "engine: reported and more\n", line("engine", " and more"))


REDIRECTED = """
import subprocess, sys
from pathlib import Path

import pytest

from loraplex.core.environment import has_colours
from loraplex.core.log_lines import log_to_standard_error, send_standard_error_to

send_standard_error_to(Path(sys.argv[1]))
log_to_standard_error("warning")
import logging
logging.getLogger("a.b").warning("reported")
subprocess.run([sys.executable, "-c", "import sys; sys.stderr.write('of a child')"], check=True)
"""


def redirected(file: Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", REDIRECTED, str(file)]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)


def test_a_file_gets_what_standard_error_would_of_all_processes(tmp_path: Path) -> None:
    file = tmp_path / "log.txt"
    file.write_text("kept\n")
    for _ in range(2):
        done = redirected(file)
        assert (done.returncode, done.stderr) == (0, "")
    kept, *lines = file.read_text().replace("of a child", "of a child\n").splitlines()
    assert kept == "kept"
    assert [re.sub(r"^W \S+ \S+ ", "", line) for line in lines] == [
        "a.b: reported",
        "of a child",
    ] * 2


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    done = redirected(tmp_path / "gone" / "log.txt")
    assert done.returncode == 1
    assert re.search(naming("--log-file", f"{tmp_path}/gone/log.txt"), done.stderr)


AS_JSON = """
import logging
from loraplex.core.environment import child_environment, set_log_format
from loraplex.core.log_lines import log_to_standard_error

set_log_format("json")
assert child_environment()["LORAPLEX_LOG_FORMAT"] == "json"
log_to_standard_error("info", "engine", "%(request)s")
logging.getLogger("a").info("two\\nlines", extra={"request": " [r t]"})
try:
    1 / 0
except ZeroDivisionError:
    logging.getLogger("a").exception("it failed")
set_log_format("text")
assert "LORAPLEX_LOG_FORMAT" not in child_environment()
"""


def test_json_has_one_object_a_line() -> None:
    run = subprocess.run(
        [sys.executable, "-c", AS_JSON], check=True, capture_output=True, text=True, timeout=60
    )
    first, second = map(json.loads, run.stderr.splitlines())
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", first.pop("time"))
    assert first == {
        "level": "info",
        "source": "engine",
        "message": "two\nlines",
        "request_id": "r",
        "trace_id": "t",
    }
    assert second["level"] == "error"
    assert "ZeroDivisionError" in second["exception"]


def test_colours_are_for_terminals_that_want_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert has_colours(is_terminal=True)
    assert not has_colours(is_terminal=False)
    monkeypatch.setenv("NO_COLOR", "1")
    assert not has_colours(is_terminal=True)
