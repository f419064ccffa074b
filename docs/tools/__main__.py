"""`python -m tools DIR` writes the committed generated pages there, with `--built` the others."""

import sys
from pathlib import Path

from tools.pages import BUILT, PAGES


def main(folder: Path, *options: str) -> None:
    pages = BUILT if "--built" in options else PAGES
    for name, page in pages.items():
        (folder / name).write_text(page(), encoding="utf-8")


main(Path(sys.argv[1]), *sys.argv[2:])
