import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from loraplex.core.private_folder import PrivateFolder

KILLED = """
import os, signal, tempfile
from loraplex.core.private_folder import PrivateFolder
tempfile.tempdir = {parent!r}
folder = PrivateFolder()
open(folder.path + "/socket", "w").close()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def parent(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_the_folder_of_a_killed_process_is_removed(parent):
    subprocess.run([sys.executable, "-c", KILLED.format(parent=str(parent))], check=False)
    (left,) = parent.iterdir()
    folder = PrivateFolder()
    assert [path.name for path in parent.iterdir()] == [Path(folder.path).name]
    assert not left.exists()
    folder.remove()
    folder.remove()
    assert list(parent.iterdir()) == []


def test_folders_in_use_stay(parent):
    first, second = PrivateFolder(), PrivateFolder()
    assert sorted(map(str, parent.iterdir())) == sorted([first.path, second.path])
    first.remove()
    second.remove()


def test_what_is_not_such_a_folder_stays(parent):
    (parent / "loraplex-1000").mkdir()  # the folder of the request sockets has no lock
    (parent / "loraplex-file").write_text("")
    elsewhere = parent / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / ".owner").write_text("")
    (parent / "loraplex-link").symlink_to(elsewhere)
    PrivateFolder().remove()
    assert sorted(path.name for path in parent.iterdir()) == [
        "elsewhere",
        "loraplex-1000",
        "loraplex-file",
        "loraplex-link",
    ]


def test_no_other_user_may_enter(parent):
    folder = PrivateFolder()
    assert os.stat(folder.path).st_mode & 0o777 == 0o700
    folder.remove()
