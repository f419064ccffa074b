"""Finds the folder of a model or tokenizer: a path, or the download of a Hugging Face hub id."""

import contextlib
import os
from pathlib import Path
from typing import Final

from loraplex.core.environment import hub_records, state_directory
from loraplex.core.errors import ConfigError
from loraplex.core.gguf import gguf_parts
from loraplex.core.state_places import GGUF_FOLDERS
from loraplex.execution.weights.file_locks import use
from loraplex.execution.weights.gguf_folder import SUFFIX as GGUF_SUFFIX
from loraplex.execution.weights.gguf_folder import gguf_folder
from loraplex.execution.weights.near_paths import near_paths
from loraplex.models.gguf_config import gguf_of

_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")
_TOKENIZER_FILES = ("*.json", "*.jinja", "*.model", "*.txt")
_OLD_WEIGHTS = ("*.bin", "*.bin.index.json")


_CONFIG: Final = "config.json"
_USED: Final[dict[Path, int]] = {}
"""Locked records of models that this process uses, until it ends."""


def resolve_model(path_or_id: str, revision: str | None = None, state_dir: str = "") -> Path:
    """Return the model's folder; a hub id is downloaded, or taken from the hub's cache.

    For a GGUF file, or a folder with one, the folder is made in state_dir, which is as configured.
    `revision` is a branch, tag or commit of the hub. Raises ConfigError for what is neither a model
    nor a hub id.
    """
    here = model_here(path_or_id)
    if here is not None:
        return (
            gguf_folder(here, state_directory(state_dir) / GGUF_FOLDERS) if here.is_file() else here
        )
    folder = _download(path_or_id, revision, _FILES)
    if not any(folder.glob("*.safetensors")):
        folder = _download(path_or_id, revision, _OLD_WEIGHTS)
    return folder


def model_here(path_or_id: str) -> Path | None:
    """Return a model's local folder or GGUF file; None for a hub id.

    Raises ConfigError for what is neither a model nor a hub id.
    """
    file = Path(path_or_id).expanduser()
    if file.suffix == GGUF_SUFFIX and not file.is_dir():
        if not file.exists():
            raise ConfigError(f"there is no file {path_or_id}{near_paths(file)}")
        return file
    here = _folder_here(path_or_id)
    gguf = None if here is None else _only_gguf_file(here)
    if gguf is not None:
        return gguf
    if here and (here / "adapter_config.json").is_file() and not (here / _CONFIG).is_file():
        raise ConfigError(
            f"{path_or_id} is a LoRA adapter, no model: serve its base with "
            f"--adapter NAME={path_or_id}"
        )
    return here


def _only_gguf_file(folder: Path) -> Path | None:
    """Return the GGUF file, or a part of it, of a folder without other weights; None: it has none.

    Raises ConfigError if it has several. Files of images' encoders (mmproj) do not count.
    """
    files = sorted(file for file in folder.glob("*.gguf") if not file.name.startswith("mmproj"))
    stands_for_one = (folder / _CONFIG).is_file() and gguf_of(folder)
    if stands_for_one or any(any(folder.glob(form)) for form in ("*.safetensors", "*.bin")):
        return None
    models = {gguf_parts(file)[0]: file for file in files}
    if len(models) > 1:
        first, second, *_ = models
        raise ConfigError(
            f"{folder} has {len(models)} GGUF models, such as {first.name} and {second.name}: give "
            "the path of one of them"
        )
    return next(iter(models.values()), None)


def resolve_tokenizer(path_or_id: str) -> Path:
    """Return the folder of a separate tokenizer, like resolve_model, without any weights."""
    return _folder_here(path_or_id) or _download(path_or_id, None, _TOKENIZER_FILES)


def _folder_here(path_or_id: str) -> Path | None:
    """Return a local folder; None for a hub id. Raises ConfigError for what is neither."""
    path = Path(path_or_id).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise ConfigError(f"{path_or_id} is a file; a model is a folder, a GGUF file or a hub id")
    if not _may_be_hub_id(path_or_id):
        raise ConfigError(f"there is no folder {path_or_id}{near_paths(path)}")
    return None


def _may_be_hub_id(text: str) -> bool:
    """Whether it is `name` or `owner/name`.

    What begins or ends like a path is none, nor is what begins with a folder that exists.
    """
    parts = text.split("/")
    if len(parts) > 2 or not all(part and part[0] not in ".~" for part in parts):
        return False
    return len(parts) == 1 or not Path(parts[0]).is_dir()


def _download(hub_id: str, revision: str | None, patterns: tuple[str, ...]) -> Path:
    # A slow import that is seldom needed.
    from huggingface_hub import snapshot_download, try_to_load_from_cache  # noqa: PLC0415
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError  # noqa: PLC0415 - likewise

    try:
        is_new = try_to_load_from_cache(hub_id, _CONFIG, revision=revision) is None
        folder = Path(snapshot_download(hub_id, revision=revision, allow_patterns=list(patterns)))
        _note_use(folder.parent.parent, is_new=is_new)
        return folder
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(
            f"{hub_id} is not a folder here{near_paths(Path(hub_id))}; the Hugging Face hub does "
            f"not give it: {reason.removeprefix('Got: ').rstrip('.')}; check the name and the "
            "network, or download the model elsewhere and give its folder"
        ) from error


def _note_use(folder: Path, *, is_new: bool) -> None:
    """Record a model that loraplex downloaded, for `loraplex cache`, and that it is used now.

    folder: the model's in the hub's cache. A model that was there before has no record.
    """
    record = hub_records() / folder.name
    if record in _USED or not folder.name.startswith("models--"):
        return
    with contextlib.suppress(OSError):  # no record: the model is not listed
        if is_new:
            record.parent.mkdir(parents=True, exist_ok=True)
            record.write_text(str(folder), encoding="utf-8")
        if record.exists():
            _USED[record] = os.open(record, os.O_RDONLY | os.O_CLOEXEC)
            use(_USED[record])
            os.utime(record)
