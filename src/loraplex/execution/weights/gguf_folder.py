"""Model folder for a GGUF file: configuration and tokenizer out of the file, and a link to it.

All that reads models reads folders. The files that describe the model are small, and are written
anew whenever a file is opened.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from loraplex.core.errors import ConfigError
from loraplex.core.gguf import GgufFile, read_gguf
from loraplex.models.gguf_config import FILE_NAME, hugging_face_config

SUFFIX: Final = ".gguf"
_TOKENIZER_FILES: Final = (
    *("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "chat_template.jinja", "generation_config.json"),
)


def gguf_folder(path: Path, folders: Path) -> Path:
    """Return the folder, in `folders`, that stands for a file.

    A tokenizer and a generation_config.json in the file's own folder are taken instead of what the
    file holds. Raises ConfigError, UnsupportedModelError.
    """
    path = path.resolve()
    file = read_gguf(path)
    if file.metadata.get("general.type") == "adapter":
        raise ConfigError(
            f"{path} is a LoRA adapter, no model: serve its base with --adapter NAME={path}"
        )
    files: dict[str, Mapping[str, Any] | str] = {"config.json": hugging_face_config(file)}
    own = [name for name in _TOKENIZER_FILES if (path.parent / name).is_file()]
    if not {"tokenizer.json", "tokenizer.model"} & set(own):
        # A server must not wait for this import before it starts its engines.
        from loraplex.text.gguf_tokenizer import gguf_tokenizer  # noqa: PLC0415

        tokenizer = gguf_tokenizer(file.metadata, str(path))
        files |= {"tokenizer.json": tokenizer.tokenizer, "tokenizer_config.json": tokenizer.config}
        own = [name for name in own if name not in files]
    name = f"{path.stem}-{hashlib.sha256(os.fsencode(path)).hexdigest()[:12]}"
    try:
        return _written(folders / name, file, files, own)
    except OSError as error:
        raise ConfigError(f"cannot write {folders / name}: {error.strerror}") from error


def _written(
    folder: Path, file: GgufFile, files: Mapping[str, Mapping[str, Any] | str], own: list[str]
) -> Path:
    """Write the files, each of which is whole at any time."""
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    new = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content, indent=1)
        (new / name).write_text(text, encoding="utf-8")
    for name in own:
        shutil.copyfile(file.path.parent / name, new / name)
    (new / FILE_NAME).symlink_to(file.path)
    for name in sorted(path.name for path in new.iterdir()):
        folder.mkdir(mode=0o700, exist_ok=True)
        (new / name).replace(folder / name)
    new.rmdir()
    for name in {*_TOKENIZER_FILES} - {*files, *own}:  # of another state of the file's own folder
        (folder / name).unlink(missing_ok=True)
    return folder
