import sys

import pytest
from comparison.peers.conversion import made_once

from loraplex.core.errors import ConfigError
from support.naming import naming


def python(code):
    return lambda target: [sys.executable, "-c", code, str(target)]


WRITES = "import sys; open(sys.argv[1], 'w').write('made')"
MAKES_FOLDER = "import os, sys; os.mkdir(sys.argv[1])"


async def test_a_file_is_made_once(tmp_path):
    target = tmp_path / "folder" / "file"
    assert await made_once(target, python(WRITES), tmp_path / "log") == target
    assert target.read_text() == "made"
    assert await made_once(target, python("raise SystemExit(1)"), tmp_path / "log") == target


async def test_a_failure_leaves_nothing_and_says_what_was_printed(tmp_path):
    code = f"{WRITES}\nraise SystemExit('the model is odd')"
    with pytest.raises(ConfigError, match=naming("status 1", "the model is odd", "SystemExit")):
        await made_once(tmp_path / "file", python(code), tmp_path / "log")
    assert not (tmp_path / "file").exists()


async def test_what_an_interrupted_run_left_is_made_anew(tmp_path):
    (tmp_path / "draft-x").mkdir()
    (tmp_path / "draft-x" / "half").touch()
    made = await made_once(tmp_path / "x", python(MAKES_FOLDER), tmp_path / "log")
    assert list(made.iterdir()) == []


async def test_a_command_that_makes_nothing_is_reported(tmp_path):
    with pytest.raises(ConfigError, match="made no file"):
        await made_once(tmp_path / "file", python("print('hm')"), tmp_path / "log")


async def test_a_command_that_is_not_there_is_reported(tmp_path):
    with pytest.raises(ConfigError, match=naming("/no/program")):
        await made_once(tmp_path / "file", lambda _: ["/no/program"], tmp_path / "log")
