"""Where the state of a server is: one folder for each base model, unless the operator sets one."""

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from loraplex.core.config import Config
from loraplex.core.environment import state_directory

MODELS: Final = "models"
"""Folder of the states by model, in the user's state directory."""
GGUF_FOLDERS: Final = "gguf"
"""Folder, in the state directory, of the folders that stand for GGUF files."""
_MAX_NAME: Final = 60
_DIGEST_DIGITS: Final = 8


def state_root(config: Config) -> Path:
    """Return the folder that clients may not read: the state of this server, or of all."""
    return state_directory(config.server.state_dir)


def state_place(config: Config) -> Path:
    """Return the folder of this server's state."""
    root = state_root(config)
    return root if config.server.state_dir else root / MODELS / state_name(config)


def state_name(config: Config) -> str:
    """Return the name of the folder: that of the configuration, or one made of the models."""
    return config.state_name or name_of(model.path for model in config.models.values())


def name_of(places: Iterable[str]) -> str:
    """Return the name of the state of these models: folders or hub ids, in any order."""
    found = sorted({_origin(place) for place in places})
    first = re.sub(r"[^A-Za-z0-9._-]", "_", Path(found[0]).name if found else "no-model")
    others = f"+{len(found) - 1}" if len(found) > 1 else ""
    digest = hashlib.sha256("\0".join(found).encode()).hexdigest()[:_DIGEST_DIGITS]
    return f"{first[:_MAX_NAME]}{others}-{digest}"


def _origin(place: str) -> str:
    """Return the same text for the same model: links and working folders do not count."""
    path = Path(place).expanduser()
    return str(path.resolve()) if path.exists() else place
