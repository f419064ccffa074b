"""Unpacks .gpu/wheels into .gpu/site: wheels are zip files, so no pip is needed there.

What the machine's own Python has already is left out: its versions fit one another. Of the standard
library alone, since it makes the rest importable.
"""

import importlib.util
import shutil
import sys
import zipfile
from pathlib import Path

WHEELS, SITE = Path(".gpu/wheels"), Path(".gpu/site")


def unpack(wheels: Path, site: Path) -> list[str]:
    """The names of the wheels that were needed."""
    shutil.rmtree(site, ignore_errors=True)
    site.mkdir(parents=True)
    needed = []
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            if not all(map(_is_here, _modules(archive))):
                archive.extractall(site)
                needed.append(wheel.name)
    return needed


def _modules(archive: zipfile.ZipFile) -> set[str]:
    """What can be imported from it."""
    tops = {name.split("/")[0].removesuffix(".py") for name in archive.namelist()}
    return {top for top in tops if top.isidentifier() and not top.startswith("_")}


def _is_here(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


if __name__ == "__main__":
    names = unpack(WHEELS, SITE)
    sys.stderr.write(f"unpacked into {SITE}: {', '.join(names) or 'nothing'}\n")
