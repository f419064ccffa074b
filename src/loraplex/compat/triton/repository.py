"""Model repositories for Triton -> settings of the served base models, and what clients see.

Each tensorrt_llm and each vLLM model is a served base model under its name in the repository; the
models around a tensorrt_llm are names before it, and so is an ensemble of one vLLM model.
"""

import dataclasses
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any

from google.protobuf import text_format

from loraplex.compat.triton.model_folder import (
    CONFIG_FILE,
    ModelFolder,
    Notes,
    read_model_folder,
    read_model_folders,
)
from loraplex.compat.triton.roles import TENSORRT_LLM_PARAMETERS, Role, role_of
from loraplex.compat.triton.setting_rows import ENGINE_ARGS
from loraplex.compat.triton.trtllm import TensorrtLlmModels
from loraplex.compat.triton.vllm import read_vllm_model, vllm_ensemble
from loraplex.core.config import Config
from loraplex.core.config_layers import Layer
from loraplex.core.errors import (
    ConfigError,
    InvalidRequestError,
    NotReadyError,
    UnsupportedFeatureError,
)
from loraplex.frontends.kserve.errors import NotFoundError
from loraplex.frontends.kserve.models.model_control import FoundModel, parse_config
from loraplex.frontends.kserve.models.triton_model import ModelDeclaration

_PARTS = (Role.PREPROCESSING, Role.POSTPROCESSING)


@dataclasses.dataclass(frozen=True, slots=True)
class Repository:
    layers: tuple[Layer, ...]
    """Settings of the base models of the wanted models, lowest first; each value has its source."""
    declarations: tuple[ModelDeclaration, ...]
    """Models by name, also those that are not wanted, but not those that cannot be served."""
    loaded: tuple[str, ...] | None
    """Wanted names and their parts; None: all."""
    notes: Notes
    folders: Mapping[str, ModelFolder]
    """Folders of the declared models by name."""


def read_repositories(paths: Sequence[Path], wanted: Collection[str] | None = None) -> Repository:
    """Read all models of all folders.

    wanted: the models to load; None: all. Raises ConfigError if one of them cannot be served;
    others that cannot are left out, and noted.
    """
    notes, problems = Notes(), dict[str, str]()
    found = [f for path in paths for f in read_model_folders(path, notes, problems)]
    folders = _by_name(found, problems)
    return read_folders(folders, wanted, notes, problems)


def read_folders(
    folders: Mapping[str, ModelFolder],
    wanted: Collection[str] | None = None,
    notes: Notes | None = None,
    problems: Mapping[str, str] | None = None,
) -> Repository:
    """Read a repository from folders that have been read.

    problems: by name, reasons why other folders could not be read.
    """
    models = _Models(folders, wanted, notes or Notes(), dict(problems or {}))
    bases = models.connect()
    loaded = None if wanted is None else models.with_steps(wanted)
    served = {bases[name] for name in (bases if loaded is None else loaded)}
    declarations = sorted(models.declarations(bases, served), key=lambda each: each.name)
    return Repository(
        layers=tuple(layer for base in sorted(served) for layer in models.layers(base)),
        declarations=tuple(declarations),
        loaded=loaded,
        notes=models.notes,
        folders={each.name: folders[each.name] for each in declarations},
    )


class _Models:
    """The models of the folders, while they are read; those that cannot be served leave."""

    def __init__(
        self,
        folders: Mapping[str, ModelFolder],
        wanted: Collection[str] | None,
        notes: Notes,
        problems: dict[str, str],
    ) -> None:
        self.notes = notes
        self._required = wanted
        """None: all."""
        self._folders = folders
        self._problems = problems
        """Reasons by name why models cannot be served."""
        self._roles: dict[str, Role] = {}
        self._vllm: dict[str, list[Layer]] = {}
        """Settings by name of the vLLM models."""
        self._tensorrt = TensorrtLlmModels(folders, self._roles, problems, notes)
        for name, reason in list(problems.items()):
            self._drop(name, reason)
        for name, folder in folders.items():
            try:
                self._roles[name] = role_of(folder)
            except ConfigError as error:
                self._drop(name, error.message)

    def connect(self) -> dict[str, str]:
        """Return the base model of each model. Raises ConfigError."""
        bases: dict[str, str] = {}
        # Parts come last: they belong to ensembles.
        for name in sorted(self._roles, key=lambda name: self._roles[name] in _PARTS):
            try:
                bases[name] = self._tensorrt.base_of(name)
            except ConfigError as error:
                self._drop(name, error.message)
        return bases

    def with_steps(self, names: Collection[str]) -> tuple[str, ...]:
        """Return names, and those of the steps of their ensembles, all of which must be served.

        Raises ConfigError.
        """
        for name in names:
            if name not in self._roles:
                raise ConfigError(
                    f"--load-model {name}: there is no such model; there are "
                    f"{', '.join(self._roles)}"
                )
        ensembles = [name for name in names if self._roles[name] is Role.ENSEMBLE]
        steps = [step for name in ensembles for step in self._tensorrt.steps(name)]
        self._required = tuple(dict.fromkeys([*names, *steps]))
        for name in steps:
            if name in self._problems:
                raise ConfigError(self._problems[name])
        return self._required

    def declarations(
        self, bases: Mapping[str, str], served: Collection[str]
    ) -> Iterator[ModelDeclaration]:
        """Yield what clients see of each model. Raises ConfigError.

        served: the base models that are started; notes on others are left out.
        """
        for name, role in list(self._roles.items()):
            try:
                notes = self.notes if bases[name] in served else Notes()
                yield self._declaration(name, role, bases[name], notes)
            except ConfigError as error:
                self._drop(name, error.message)

    def _declaration(self, name: str, role: Role, base: str, notes: Notes) -> ModelDeclaration:
        if role is Role.VLLM:
            self._vllm[name], declaration = read_vllm_model(self._folders[name], notes)
            return declaration
        if self._roles.get(base) is Role.VLLM:
            _, step = read_vllm_model(self._folders[base], Notes())
            return vllm_ensemble(self._folders[name], base, step.options, notes)
        return self._tensorrt.declaration(name, notes)

    def layers(self, base: str) -> Sequence[Layer]:
        """Return the settings of one base model, lowest first. Raises ConfigError."""
        return self._vllm[base] if base in self._vllm else list(self._tensorrt.layers(base))

    def _drop(self, name: str, reason: str) -> None:
        """Leave a model out. Raises ConfigError if it is wanted."""
        if self._required is None or name in self._required:
            raise ConfigError(reason)
        self._problems[name] = reason
        self._roles.pop(name, None)
        self.notes.info(f"{name} is left out: {reason}")


def _by_name(folders: Sequence[ModelFolder], problems: dict[str, str]) -> dict[str, ModelFolder]:
    """Return folders by name; a name that stands twice is a problem."""
    by_name: dict[str, ModelFolder] = {}
    for folder in folders:
        other = by_name.setdefault(folder.name, folder)
        if other is not folder:
            problems[folder.name] = (
                f"model '{folder.name}' exists twice: {other.path} and {folder.path}"
            )
    return {name: folder for name, folder in by_name.items() if name not in problems}


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
