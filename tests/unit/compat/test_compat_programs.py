"""Programs of other systems that compat/bin has under their own names."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PROGRAMS = sorted((ROOT / "compat" / "bin").iterdir())


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_the_pages_name_it(program: Path) -> None:
    pages = ["README.md"] if program.name.endswith(".sh") else ["README.md", "docs/triton.md"]
    for page in pages:
        text = (ROOT / page).read_text(encoding="utf-8")
        assert "`compat/bin`" in text
        assert f"`{program.name}`" in text
