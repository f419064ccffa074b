"""Model folder for a GGUF file: configuration and tokenizer out of the file, and a link to it.

All that reads models reads folders. The files that describe the model are small, and are written
anew whenever a file, or what lies next to it, has changed.
"""

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from loraplex.adapters.seen_files import FileIdentity, SeenFiles, identities_of
from loraplex.core.errors import ConfigError, InvalidAdapterError
from loraplex.core.gguf import GgufFile, gguf_parts, gguf_stem, read_gguf
from loraplex.core.version import __version__
from loraplex.execution.weights.weight_files import text_files
from loraplex.models.gguf_config import hugging_face_config, names_in_folder

SUFFIX: Final = ".gguf"


def gguf_folder(path: Path, folders: Path) -> Path:
    """Return the folder, in `folders`, that stands for a file, or for all parts of a split one.

    A tokenizer and a generation_config.json in the file's own folder are taken instead of what the
    file holds. Raises ConfigError, UnsupportedModelError.
    """
    target = path.resolve()
    # In the hub's cache a file is a link to another whose name is a checksum.
    path = target if target.suffix == SUFFIX else path.absolute()
    parts = gguf_parts(path)
    folder = folders / _folder_name(parts[0])
    seen, context = SeenFiles(folders), f"{__version__} {folder}"
    with contextlib.suppress(InvalidAdapterError):  # a file is gone, or not there yet
        if seen.find(_identities(parts, folder), context):
            return folder
    _make(path, folder)
    with contextlib.suppress(InvalidAdapterError):
        seen.remember(_identities(parts, folder), "made of these", context)
    return folder


def _folder_name(path: Path) -> str:
    return f"{gguf_stem(path)}-{hashlib.sha256(os.fsencode(path)).hexdigest()[:12]}"


def _identities(parts: list[Path], folder: Path) -> tuple[FileIdentity, ...]:
    """Return those of all that the folder depends on, and of what is in it. Raises
    InvalidAdapterError if a file is gone."""
    sources = [*parts, *sorted(text_files(parts[0].parent))]
    made = sorted(file for file in folder.rglob("*") if not file.is_dir())
    return identities_of([*sources, *made, folder / "config.json"])


def _make(path: Path, folder: Path) -> None:
    file = read_gguf(path)
    path = file.path
    if file.metadata.get("general.type") == "adapter":
        raise ConfigError(
            f"{path} is a LoRA adapter, no model: serve its base with --adapter NAME={path}"
        )
    files: dict[str, Mapping[str, Any] | str] = {"config.json": hugging_face_config(file)}
    own = [str(place.relative_to(path.parent)) for place in text_files(path.parent)]
    files |= _tokenizer_files(file, own)
    own = [name for name in own if name not in files]
    try:
        _write(folder, file, files, own)
    except OSError as error:
        raise ConfigError(f"cannot write {folder}: {error.strerror}") from error


def _tokenizer_files(file: GgufFile, own: list[str]) -> dict[str, Mapping[str, Any] | str]:
    """Return the files that are made, where those of the file's own folder are no tokenizer."""
    is_tokenizer_there = bool({"tokenizer.json", "tokenizer.model"} & set(own))
    if is_tokenizer_there and "tokenizer_config.json" in own:
        return {}
    # A server must not wait for this import before it starts its engines.
    from loraplex.text import gguf_tokenizer  # noqa: PLC0415

    source = str(file.path)
    if is_tokenizer_there:
        config = gguf_tokenizer.gguf_tokenizer_config(file.metadata, source)
        return {"tokenizer_config.json": config}
    made = gguf_tokenizer.gguf_tokenizer(file.metadata, source)
    return {"tokenizer.json": made.tokenizer, "tokenizer_config.json": made.config}


def _write(
    folder: Path, file: GgufFile, files: Mapping[str, Mapping[str, Any] | str], own: list[str]
) -> None:
    """Write the files, each of which is whole at any time."""
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    new = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content, indent=1)
        (new / name).write_text(text, encoding="utf-8")
    for name in own:
        (new / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file.path.parent / name, new / name)
    parts = gguf_parts(file.path)
    links = names_in_folder(len(parts))
    for link, part in zip(links, parts, strict=True):
        (new / link).symlink_to(part)
    names = [*links, *files, *own]
    for name in names:
        (folder / name).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        (new / name).replace(folder / name)
    shutil.rmtree(new)
    for place in text_files(folder):  # of another state of the file's own folder
        if str(place.relative_to(folder)) not in names:
            place.unlink(missing_ok=True)
