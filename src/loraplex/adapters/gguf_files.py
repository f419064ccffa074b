"""GGUF files of a folder, which have no fixed name."""

from pathlib import Path
from typing import Final

GGUF_SUFFIX: Final = ".gguf"


def gguf_files_of(folder: Path) -> list[Path]:
    """Return the GGUF files of a folder by name; of anything else, none. Raises OSError."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if path.name.endswith(GGUF_SUFFIX))
