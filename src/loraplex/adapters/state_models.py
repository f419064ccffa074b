"""Models of a state directory, noted in it.

A state directory belongs to the path of its model. When the model has moved, or a link leads
elsewhere, the server begins with an empty one: with the note it can name the state of before.
"""

import contextlib
import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from loraplex.adapters.database import DATABASE_NAME
from loraplex.adapters.durable_files import write_atomically
from loraplex.adapters.state_files import canonical_entries

_NOTE: Final = "models.json"
_CONFIG: Final = "config.json"
_WEIGHTS: Final = (".safetensors", ".bin", ".gguf")


class StateModel(msgspec.Struct, frozen=True):
    """Model of a state directory."""

    name: str
    path: str
    """Folder, as the operator names it."""
    content: str
    """Digest of its configuration and of the names and sizes of its weights; empty: unknown."""


class StateElsewhere(msgspec.Struct, frozen=True):
    """State of the same model, or of the one that had its place, under another path."""

    folder: Path
    model: StateModel
    is_same_content: bool


_DECODER = msgspec.json.Decoder(list[StateModel])


def note_models(state_dir: Path, models: Mapping[str, str]) -> list[StateModel]:
    """Write the models of a state directory into it, unless they are there, and return them.

    models: local folders by name. Raises OSError.
    """
    found = [
        StateModel(name, os.path.abspath(path), _content_of(Path(path)))
        for name, path in sorted(models.items())
    ]
    if found != models_of(state_dir):
        write_atomically(state_dir / _NOTE, [msgspec.json.encode(found)])
    return found


def models_of(state_dir: Path) -> list[StateModel]:
    """Return the models that a state directory was last used for; none if it has no note."""
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        return _DECODER.decode((state_dir / _NOTE).read_bytes())
    return []


def states_elsewhere(state_dir: Path, models: Sequence[StateModel]) -> Iterator[StateElsewhere]:
    """Yield the states next to a state directory that have adapters of one of these models."""
    for folder in sorted(state_dir.parent.iterdir()):
        if folder == state_dir or not (folder / DATABASE_NAME).exists():
            continue
        for model in models_of(folder):
            is_same = any(model.content and model.content == one.content for one in models)
            had_its_place = any(model.path == one.path for one in models)
            if (is_same or had_its_place) and any(True for _ in canonical_entries(folder)):
                yield StateElsewhere(folder, model, is_same)
                break


def _content_of(folder: Path) -> str:
    """Return what differs between models without reading their weights."""
    try:
        digest = hashlib.sha256((folder / _CONFIG).read_bytes())
        for file in sorted(folder.iterdir()):
            if file.suffix in _WEIGHTS:
                digest.update(f"{file.name} {file.stat().st_size}\n".encode())
    except OSError:
        return ""
    return digest.hexdigest()
