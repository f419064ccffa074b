"""Checks of what `make wheel` builds, run by `make test-wheel`; other verbs leave them out.

WHEELS is the folder of the sdist and the wheels.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.native_selftest import without_compiler

collect_ignore_glob = [] if "WHEELS" in os.environ else ["test_*.py"]

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def built() -> Path:
    """Folder of the sdist and the wheels."""
    return Path(os.environ["WHEELS"]).resolve()


@pytest.fixture(scope="session")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Clean environment that has the wheel of this machine, and no compiler in its PATH."""
    folder = tmp_path_factory.mktemp("clean") / "venv"
    (wheel,) = built.glob(f"*_{os.uname().machine}.whl")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    install = (sys.executable, ROOT / ".ci" / "install.py", "install", "--quiet")
    subprocess.run(
        [*install, "--python", folder / "bin" / "python", "-c", "constraints.txt", wheel],
        cwd=ROOT,
        env=without_compiler(folder),
        check=True,
    )
    return folder
