"""The Dockerfiles pass hadolint. They are not built here: that needs Docker's daemon."""

import subprocess
import sys
from pathlib import Path

import pytest

DOCKERFILES = sorted((Path(__file__).parents[2] / "deploy" / "docker").glob("Dockerfile*"))


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_hadolint_finds_nothing(path: Path):
    hadolint = Path(sys.executable).with_name("hadolint")
    finished = subprocess.run([hadolint, path], capture_output=True, text=True)
    assert (finished.returncode, finished.stdout) == (0, "")
