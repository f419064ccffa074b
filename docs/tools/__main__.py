"""`python -m tools DIR` writes the generated pages there."""

import sys
from pathlib import Path

from tools.pages import PAGES


def main(folder: Path) -> None:
    for name, page in PAGES.items():
        (folder / name).write_text(page(), encoding="utf-8")


main(Path(sys.argv[1]))
