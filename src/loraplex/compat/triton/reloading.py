"""A model of the repository, loaded again while the server runs: from its files as they are now, or
with the configuration and the files that the request sends along.

The first load of a model starts its base model, which then stays as it was started. So what a later
load changes is what clients see of a model: its batch size, whether it is decoupled, the parameters
that shape its outputs. What would need another engine is refused by name.
"""

import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any

from google.protobuf import text_format

from loraplex.compat.triton.engine_args import ENGINE_ARGS
from loraplex.compat.triton.model_folder import CONFIG_FILE, ModelFolder, read_model_folder
from loraplex.compat.triton.parameters import TENSORRT_LLM_PARAMETERS
from loraplex.compat.triton.repository import Repository, read_folders, read_repositories
from loraplex.core.config import Config
from loraplex.core.errors import (
    ConfigError,
    InvalidRequestError,
    NotReadyError,
    UnsupportedFeatureError,
)
from loraplex.frontends.kserve.errors import NotFoundError
from loraplex.frontends.kserve.models.config_override import parse_config
from loraplex.frontends.kserve.models.model_control import FoundModel
from loraplex.frontends.kserve.models.triton_model import ModelDeclaration

_MAX_PATH_CHARS = 256
_KEYS: Mapping[str, str] = MappingProxyType(
    {row.setting: row.key for row in (*ENGINE_ARGS, *TENSORRT_LLM_PARAMETERS) if row.setting}
)
"""The users' keys by our settings."""


class Reloading:
    """Reloader of one server's repository; a frontends.kserve.models.model_control.Reload."""

    def __init__(
        self,
        repository: Repository,
        paths: Sequence[Path],
        configure: Callable[[Repository], Config],
    ) -> None:
        """repository: as the server was started with it, from its paths. configure: joins the
        settings of a repository with the server's own.
        """
        self._folders = dict(repository.folders)
        self._started = _settings(repository)
        self._paths = paths
        self._configure = configure

    def discover(self, name: str) -> FoundModel:
        """Read the repository for one model; a frontends.kserve.models.model_control.Discover."""
        try:
            names = sorted({folder.name for path in self._paths for folder in path.iterdir()})
        except OSError as error:
            raise NotReadyError(
                f"failed to load '{name}', failed to poll from model repository: cannot read "
                f"{error.filename}: {error.strerror}"
            ) from error
        if name not in names:
            raise NotFoundError(
                f"failed to load '{name}', failed to poll from model repository; its models are: "
                f"{', '.join(names)}"
            )
        try:
            repository = read_repositories(self._paths, (name,))
            base = next(d.base_model for d in repository.declarations if d.name == name)
            settings = self._configure(repository).models[base]
        except ConfigError as error:
            raise InvalidRequestError(
                f"failed to load '{name}', failed to poll from model repository: {error.message}"
            ) from None
        found = tuple(d for d in repository.declarations if d.base_model == base)
        self._folders |= {each.name: repository.folders[each.name] for each in found}
        self._started[base] = _settings(repository)[base]
        return FoundModel(found, settings)

    def __call__(
        self, declaration: ModelDeclaration, config: str | None, files: Mapping[str, bytes]
    ) -> ModelDeclaration:
        """Raises InvalidRequestError, UnsupportedFeatureError."""
        name = declaration.name
        folder = self._folders[name]
        with tempfile.TemporaryDirectory(prefix="loraplex-load-") as scratch:
            try:
                if config is not None:
                    _write_changed(Path(scratch) / name, folder, config, files)
                    folder = read_model_folder(Path(scratch) / name)
                else:
                    folder = read_model_folder(folder.path)
                changed = read_folders({**self._folders, name: folder}, (name,))
            except ConfigError as error:
                reason = error.message.replace(f"{scratch}/{name}/", "the request's ")
                raise InvalidRequestError(
                    f"failed to load '{name}', failed to poll from model repository: {reason}",
                    param="config",
                ) from None
            self._check_settings(name, changed)
        return next(model for model in changed.declarations if model.name == name)

    def _check_settings(self, name: str, changed: Repository) -> None:
        settings = _settings(changed)
        for model, found in settings.items():
            started = self._started.get(model)
            if started is None:
                raise UnsupportedFeatureError(
                    f"failed to load '{name}': it now needs the model '{model}', which does not "
                    f"run: load '{model}' first",
                    param="config",
                )
            differing = sorted(
                _KEYS.get(key, key)
                for key in {*started, *found}
                if started.get(key) != found.get(key)
            )
            if differing:
                raise UnsupportedFeatureError(
                    f"failed to load '{name}': the engine of '{model}' runs with another "
                    f"{', '.join(differing)}: change it in the repository and start the server "
                    "again",
                    param="config",
                )


def _settings(repository: Repository) -> dict[str, dict[str, Any]]:
    """Merge the settings of each base model by the order of the layers."""
    settings: dict[str, dict[str, Any]] = {}
    for layer in repository.layers:
        for model, values in layer.values["models"].items():
            settings.setdefault(model, {}).update(values)
    return settings


def _write_changed(
    target: Path, folder: ModelFolder, config: str, files: Mapping[str, bytes]
) -> None:
    """The model's folder with fields of the configuration replaced, and files.

    Files come alone, as with Triton: those of the version that is there are not seen then.
    """
    changed = parse_config(folder.name, config)
    merged = type(changed)()
    merged.CopyFrom(folder.config)
    for field, _ in changed.ListFields():
        merged.ClearField(field.name)
    merged.MergeFrom(changed)
    target.mkdir()
    (target / CONFIG_FILE).write_text(text_format.MessageToString(merged), encoding="utf-8")
    for path, content in files.items():
        _write_file(target, folder.name, path, content)
    for entry in () if files else folder.path.iterdir():
        if entry.name != CONFIG_FILE:
            (target / entry.name).symlink_to(entry.absolute())


def _write_file(target: Path, name: str, path: str, content: bytes) -> None:
    parts = PurePosixPath(path).parts
    is_below = parts and not path.startswith("/") and ".." not in parts and "\0" not in path
    if not is_below or len(path) > _MAX_PATH_CHARS or parts == (CONFIG_FILE,):
        raise InvalidRequestError(
            f"failed to load '{name}': 'file:{path[:80]}' must be a path in the model's folder, "
            f"such as 1/model.json, and not {CONFIG_FILE}",
            param=f"file:{path[:80]}",
        )
    place = target.joinpath(*parts)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content)
    except OSError as error:
        shutil.rmtree(target)
        raise InvalidRequestError(
            f"failed to load '{name}': 'file:{path}' cannot be written: {error.strerror}",
            param=f"file:{path}",
        ) from error
