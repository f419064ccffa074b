"""What docs/kubernetes.md has of images is true of deploy/docker."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "kubernetes.md").read_text(encoding="utf-8")
DOCKERFILES = sorted((ROOT / "deploy" / "docker").glob("Dockerfile*"))
COMPILER = re.compile(r"\b(?:gcc|g\+\+|clang)(?=\s)")


def running_image(dockerfile: Path) -> str:
    """Return the last stage, without comments."""
    stages = re.split(r"^FROM ", dockerfile.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return re.sub(r"^#.*$", "", stages[-1], flags=re.MULTILINE)


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_the_page_has_the_compiler_of_each_image(path: Path) -> None:
    name = path.relative_to(ROOT).as_posix()
    [compiler] = re.findall(rf"^\| `{re.escape(name)}` \| [^|]+ \| (\w+)", PAGE, re.MULTILINE)
    installed = COMPILER.findall(running_image(path))
    assert (installed or ["none"]) == [compiler]


def test_the_page_builds_an_image_that_the_chart_names() -> None:
    [built] = re.findall(r"^docker build -f (\S+) -t (\S+) \.$", PAGE, re.MULTILINE)
    dockerfile, image = built
    assert ROOT / dockerfile in DOCKERFILES
    repository, _, tag = image.rpartition(":")
    assert f'image: {{repository: {repository}, tag: "{tag}"}}' in PAGE
