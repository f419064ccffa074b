"""The commands of the pages that install loraplex."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("page", ["README.md", "docs/install.md"])
def test_torch_for_a_cpu_is_one_that_loraplex_takes(page: str) -> None:
    """A version out of the range would be replaced by a build for CUDA in the next command."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (torch,) = (text for text in project["dependencies"] if re.match(r"torch\b", text))
    commands = re.findall(r'pip install "(torch[^"]*)" --index-url', (ROOT / page).read_text())
    assert set(commands) == {torch}


@pytest.mark.parametrize("page", ["README.md", "docs/install.md"])
def test_nothing_is_installed_from_pypi_before_loraplex_is_there(page: str) -> None:
    """`pip install loraplex` finds nothing yet; wheels and folders do."""
    text = (ROOT / page).read_text(encoding="utf-8")
    assert re.search(r"not on PyPI yet", text)
    assert not re.search(r"pip install (-\S+ )*loraplex(?![-\[\w])", text)
