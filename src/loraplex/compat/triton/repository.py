"""Model repositories for Triton -> settings of the served base models, and what clients see.

Each tensorrt_llm and each vLLM model is a served base model under its name in the repository; the
models around a tensorrt_llm are names before it.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from loraplex.compat.triton.model_folder import ModelFolder, read_model_folders
from loraplex.compat.triton.notes import Notes
from loraplex.compat.triton.roles import Role, role_of
from loraplex.compat.triton.trtllm import TensorrtLlmModels
from loraplex.compat.triton.vllm import read_vllm_model
from loraplex.core.config_layers import Layer
from loraplex.core.errors import ConfigError
from loraplex.frontends.kserve.models.declaration import ModelDeclaration


@dataclasses.dataclass(frozen=True, slots=True)
class Repository:
    layers: tuple[Layer, ...]
    """Settings of `models`, lowest first; each value has its source."""
    declarations: tuple[ModelDeclaration, ...]
    """Models by name."""
    loaded: tuple[str, ...] | None
    """Requested names and their parts; None: all."""
    notes: Notes
    folders: Mapping[str, ModelFolder]
    """Folders by name: the served models and their parts."""


def read_repositories(paths: Sequence[Path], wanted: Collection[str] = ()) -> Repository:
    """All models of all folders; wanted: only these, what they are made of, and what else stands
    before the same base models. Raises ConfigError.
    """
    notes = Notes()
    folders = _by_name([f for path in paths for f in read_model_folders(path, notes)])
    missing = [name for name in wanted if name not in folders]
    if missing:
        raise ConfigError(
            f"--load-model {missing[0]}: there is no such model; there are {', '.join(folders)}"
        )
    return read_folders(folders, wanted, notes)


def read_folders(
    folders: Mapping[str, ModelFolder], wanted: Collection[str] = (), notes: Notes | None = None
) -> Repository:
    """The same of folders that have been read."""
    notes = Notes() if notes is None else notes
    roles = _roles(folders, wanted, notes)
    folders = {name: folders[name] for name in roles}
    tensorrt = TensorrtLlmModels(
        {name: f for name, f in folders.items() if roles[name] is not Role.VLLM}, roles, notes
    )
    bases = {name: tensorrt.base_of(name) for name in tensorrt.names}
    bases |= {name: name for name, role in roles.items() if role is Role.VLLM}
    served = {bases[name] for name in wanted or bases}
    layers: list[Layer] = []
    declarations = []
    for name in sorted(served):
        if roles[name] is Role.VLLM:
            vllm_layers, declaration = read_vllm_model(folders[name], notes)
            layers += vllm_layers
            declarations.append(declaration)
        else:
            layers += tensorrt.layers(name)
    declarations += [tensorrt.declaration(n) for n in tensorrt.names if bases[n] in served]
    declarations.sort(key=lambda declaration: declaration.name)
    parts = [
        step for name in wanted if roles[name] is Role.ENSEMBLE for step in tensorrt.steps(name)
    ]
    loaded = tuple(dict.fromkeys([*wanted, *parts])) if wanted else None
    kept = {name: folder for name, folder in folders.items() if bases[name] in served}
    return Repository(tuple(layers), tuple(declarations), loaded, notes, kept)


def _roles(
    folders: Mapping[str, ModelFolder], wanted: Collection[str], notes: Notes
) -> dict[str, Role]:
    """wanted: if there are any, other models may be of systems that are not served: left out."""
    roles = {}
    for name, folder in folders.items():
        try:
            roles[name] = role_of(folder)
        except ConfigError as error:
            if not wanted or name in wanted:
                raise
            notes.info(f"{name} is left out: {error.message}")
    return roles


def _by_name(folders: Sequence[ModelFolder]) -> dict[str, ModelFolder]:
    by_name: dict[str, ModelFolder] = {}
    for folder in folders:
        other = by_name.setdefault(folder.name, folder)
        if other is not folder:
            raise ConfigError(f"model '{folder.name}' is twice: {other.path} and {folder.path}")
    return by_name
