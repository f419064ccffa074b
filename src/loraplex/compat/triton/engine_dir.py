"""The folder that gpt_model_path means, and what is refused of the folders that it may mean.

Served are a Hugging Face folder, a checkpoint folder of TensorRT-LLM's own tools, and what
`loraplex compat build` and `loraplex compat convert-checkpoint` write: their config.json has the
key `loraplex` in addition to TensorRT-LLM's own keys.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loraplex.compat.triton.model_folder import ModelFolder
from loraplex.compat.triton.notes import Notes
from loraplex.core.errors import ConfigError
from loraplex.models.config_fields import read_object

PATH_PARAMETER = "gpt_model_path"
_CONFIG = "config.json"
_OURS = "loraplex"
_BUILD = "use `loraplex compat build`, or give the Hugging Face folder itself"


def find_engine_dir(folder: ModelFolder, notes: Notes) -> Path:
    """Return the folder to serve. Raises ConfigError that names a right one."""
    written = folder.parameters.text(PATH_PARAMETER)
    if written is None:
        if (folder.version_path / _CONFIG).is_file():
            notes.info(f"{folder.name}: {PATH_PARAMETER} is not set: {folder.version_path} is used")
            return _checked(folder, folder.version_path, notes)
        raise folder.parameters.error(
            PATH_PARAMETER,
            "it is not filled in (engine_dir); it must be the path of a folder that "
            "`loraplex compat build` wrote, or of a Hugging Face folder",
        )
    found = folder.find_folder(written)
    if found is None:
        raise folder.parameters.error(
            PATH_PARAMETER,
            f"there is no folder {written}, neither from the working directory nor below "
            f"{folder.path}",
        )
    if found != Path(written).expanduser():
        notes.info(f"{folder.name}: {PATH_PARAMETER} {written} is {found}")
    return _checked(folder, found, notes)


def built_batch_size(engine: Path) -> int | None:
    """Return the batch size that an engine was built for; None: its folder does not record it."""
    build = read_object(engine / _CONFIG).get("build_config")
    size = build.get("max_batch_size") if isinstance(build, Mapping) else None
    return size if isinstance(size, int) and size > 0 else None


def _checked(folder: ModelFolder, engine: Path, notes: Notes) -> Path:
    parameters = folder.parameters
    if not (engine / _CONFIG).is_file():
        if any(engine.glob("*.engine")):
            raise parameters.error(PATH_PARAMETER, f"{engine} holds TensorRT engines; {_BUILD}")
        raise parameters.error(PATH_PARAMETER, f"{engine} has no {_CONFIG}; {_BUILD}")
    config = read_object(engine / _CONFIG)
    if _OURS not in config and ("build_config" in config or "builder_config" in config):
        raise parameters.error(
            PATH_PARAMETER,
            f"{engine} is an engine that TensorRT-LLM built, which only TensorRT can run; {_BUILD}",
        )
    _check_mapping(config, engine, notes)
    return engine


def _check_mapping(config: Mapping[str, Any], engine: Path, notes: Notes) -> None:
    """How many GPUs the build was made for. Ranks are another matter: see docs/ranks.md."""
    pretrained = config.get("pretrained_config", config)
    mapping = pretrained.get("mapping") if isinstance(pretrained, Mapping) else None
    if not isinstance(mapping, Mapping):
        return
    sizes = {name: mapping.get(name, 1) for name in ("tp_size", "pp_size")}
    needed = sizes["tp_size"] * sizes["pp_size"]
    world_size = mapping.get("world_size", needed)
    if world_size != needed:
        raise ConfigError(
            f"{engine / _CONFIG}: world_size is {world_size}, but tp_size {sizes['tp_size']} times "
            f"pp_size {sizes['pp_size']} is {needed}"
        )
    if needed > 1:
        notes.warning(
            f"{engine} was built for {needed} GPUs: it is served by one process, unless "
            "this machine has as many or tensor_parallel_size is set"
        )
