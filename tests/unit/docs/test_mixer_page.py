"""The files that docs/how-to-add-a-mixer.md lists are those that know a kind of mixer."""

import inspect
import re
import sys
from pathlib import Path

import loraplex
from loraplex.models.mixers.kinds import MIXERS
from loraplex.models.registry import ARCHITECTURES

PACKAGE = Path(loraplex.__file__).parent
PAGE = Path(__file__).parents[3] / "docs" / "how-to-add-a-mixer.md"


def kind_of(spec: type) -> str:
    """Return the name of a kind's two files."""
    return spec.__module__.rpartition(".")[2]


def files_that_know(kind: str) -> set[str]:
    """Return the kind's two files and those that import one of them, without the families."""
    families = {inspect.getfile(sys.modules[read.__module__]) for read in ARCHITECTURES.values()}
    known = re.compile(rf"^from loraplex\.models\.(specs|mixers)\.{kind} import", re.MULTILINE)
    found = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if str(path) not in families and known.search(path.read_text())
    }
    return found | {f"models/specs/{kind}.py", f"models/mixers/{kind}.py"}


def test_the_page_lists_the_files_that_a_kind_touches() -> None:
    page = PAGE.read_text()
    rows = re.findall(r"^\| `(\S+\.py)` \|", page, re.MULTILINE)
    of_attention = re.findall(r"`(\S+\.py)`", page.split("Attention has nine readers more")[1])[:9]
    of_state_spaces = re.findall(r"`(\S+\.py)`", page.split("A state space has one more")[1])[:1]
    of_cross = re.findall(r"`(\S+\.py)`", page.split("Cross attention has ")[1])[:1]
    of_latent = re.findall(r"`(\S+\.py)`", page.split("Latent attention has one more")[1])[:1]
    others = {
        "attention": of_attention,
        "ssm": of_state_spaces,
        "cross": of_cross,
        "latent": of_latent,
    }
    kinds = [kind_of(spec) for spec in MIXERS]
    assert rows[-1] == "models/families/<family>.py"
    for kind in kinds:
        listed = {row.replace("<kind>", kind) for row in rows[:-1]}
        assert files_that_know(kind) == listed | set(others.get(kind, ()))
    assert others.keys() <= set(kinds)


def test_the_files_of_the_page_are_there() -> None:
    for path in re.findall(
        r"`((?:models|kernels|execution|compat|tests)/[^`<>]+\.py)`", PAGE.read_text()
    ):
        root = PAGE.parents[1] if path.startswith("tests/") else PACKAGE
        assert (root / path).is_file(), path
