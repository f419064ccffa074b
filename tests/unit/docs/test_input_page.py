"""The files that docs/how-to-add-an-input.md lists are those that know images."""

import ast
import re
from pathlib import Path

import loraplex

PACKAGE = Path(loraplex.__file__).parent
PAGE = Path(__file__).parents[3] / "docs" / "how-to-add-an-input.md"
KNOWS = re.compile(
    r"(?:\b|_)(ImageSpan|ImageCapacity|ImageCells?|ImageRows|ImageEncoder|EncodeImage|EncodedRows|"
    r"EncodedSpan|image_cells|image_salts?|later_salts|hold_images|release_images|num_to_encode|"
    r"encoded_spans|capacity\.images|batch\.encoded)\b"
)
NAMES = re.compile(KNOWS.pattern.replace(r"capacity\.", "").replace(r"batch\.", ""))
"""Code that knows has one of these names in its text, and the others need not be parsed."""
BY_POSITION = {"memory/kv_blocks.py", "memory/prefix_cache.py", "scheduling/prefill.py"}
"""Files that know salts and tokens to encode, and no image."""


def files_that_know_images() -> set[str]:
    """Return the files whose code names a class or a field of images."""
    return {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if NAMES.search(text := path.read_text()) and KNOWS.search(ast.unparse(ast.parse(text)))
    }


def test_the_page_lists_the_files_that_an_input_touches() -> None:
    rows = re.findall(r"^\| `(\S+\.py)` \|", PAGE.read_text(), re.MULTILINE)
    found = files_that_know_images()
    assert found - BY_POSITION == set(rows)
    assert found >= BY_POSITION


def test_the_files_of_the_page_are_there() -> None:
    for path in re.findall(r"`([a-z_]+/[^`<>]+\.py)`", PAGE.read_text()):
        root = PAGE.parents[1] if path.startswith("tests/") else PACKAGE
        assert (root / path).is_file(), path
