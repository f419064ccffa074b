"""The models of a TensorRT-LLM repository: how they are connected, and what each declares."""

import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from loraplex.compat.triton.config_json import completed_config, declared_datatype
from loraplex.compat.triton.model_folder import ModelFolder, Notes, device_layer
from loraplex.compat.triton.roles import (
    KINDS,
    PART_PARAMETERS,
    TENSORRT_LLM_PARAMETERS,
    Role,
    check_known,
    check_served,
)
from loraplex.compat.triton.setting_rows import SettingRow
from loraplex.core.config_layers import Layer
from loraplex.core.errors import ConfigError
from loraplex.core.scheduler_settings import BATCHING_ALIASES, Batching
from loraplex.frontends.kserve.models.catalog import DEFAULT_MAX_BATCH_SIZE
from loraplex.frontends.kserve.models.kinds import LENGTHS, POSTPROCESSING_OF_2023
from loraplex.frontends.kserve.models.triton_model import ModelDeclaration, ModelOptions
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


DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {"batch_scheduler_policy": "guaranteed_no_evict", "enable_prefix_cache": False}
)
"""Defaults of a TensorRT-LLM repository (version of January 2024) that differ from ours."""
_PREFETCH = "lora_prefetch_dir"
_BATCHING = "gpt_model_type"
_ZERO_IS_UNSAID = ("iter_stats_max_iterations", "max_tokens_in_paged_kv_cache")
_QUEUE_FIELDS = ("max_queue_size", "max_queue_delay_microseconds")


def setting_layers(folder: ModelFolder, engine: Path, notes: Notes) -> Iterator[Layer]:
    """Lowest first, each with the place of its value. Raises ConfigError."""
    yield _layer(folder, "default of a TensorRT-LLM model repository", dict(DEFAULTS))
    yield from device_layer(folder, notes)
    yield _layer(folder, folder.parameters.place("gpt_model_path"), {"path": str(engine)})
    yield from _queue_layers(folder)
    check_known(folder, TENSORRT_LLM_PARAMETERS, notes)
    check_served(folder, TENSORRT_LLM_PARAMETERS, notes)
    for row in TENSORRT_LLM_PARAMETERS:
        yield from _parameter_layer(folder, row, notes)


def _layer(folder: ModelFolder, source: str, settings: Mapping[str, Any]) -> Layer:
    return Layer(source, {"models": {folder.name: settings}})


def _parameter_layer(folder: ModelFolder, row: SettingRow, notes: Notes) -> Iterator[Layer]:
    parameters = folder.parameters
    value = parameters.read(row)
    if value is None:
        return
    if row.key == _BATCHING and value not in {*Batching, *BATCHING_ALIASES}:
        # The original's words, which its tests look for in the log.
        raise parameters.error(
            row.key,
            "Invalid gpt_model_type. Must be v1/inflight_batching/inflight_fused_batching, got "
            f"{value!r}",
        )
    if row.key == _PREFETCH:
        yield from _prefetch_layer(folder, value, notes)
    elif row.setting and (value or row.key not in _ZERO_IS_UNSAID):
        yield _layer(folder, f"{parameters.place(row.key)}: {row.key}", {row.setting: value})


def _prefetch_layer(folder: ModelFolder, written: str, notes: Notes) -> Iterator[Layer]:
    found = folder.find_folder(written)
    if found is None:
        notes.warning(
            f"{folder.name}: {_PREFETCH}: there is no folder {written}: nothing is loaded"
        )
    else:
        place = folder.parameters.place(_PREFETCH)
        yield _layer(folder, place, {"adapter_dirs": [str(found)]})


def _queue_layers(folder: ModelFolder) -> Iterator[Layer]:
    """Top-level fields: of the wait for company, and of how many may wait."""
    batching = folder.config.dynamic_batching
    values = (batching.default_queue_policy.max_queue_size, batching.max_queue_delay_microseconds)
    for field, value in zip(_QUEUE_FIELDS, values, strict=True):
        if value:
            yield _layer(folder, folder.line_of(field), {field: value})


_BLS_INNER = "tensorrt_llm_model_name"
_DEFAULT_INNER = "tensorrt_llm"
_TOKENIZER = "tokenizer_dir"
_PREPARED_END_ID = "OUT_END_ID"
_OUTPUT_OF_MAY_2024 = "batch_index"
"""Repositories that do not declare it are older, when the backend sent all outputs always."""
_ROWS = {row.key: row for row in TENSORRT_LLM_PARAMETERS}
_YES = frozenset({"true", "yes", "1", "t", "y"})
_NO = frozenset({"false", "no", "0", "f", "n"})


class TensorrtLlmModels:
    """Models of one or several repositories that are served together."""

    def __init__(
        self,
        folders: Mapping[str, ModelFolder],
        roles: Mapping[str, Role],
        problems: Mapping[str, str],
        notes: Notes,
    ) -> None:
        """roles: of the models that can be served; problems: why others cannot, by name. The
        caller may change both.
        """
        self._folders = folders
        self._roles = roles
        self._problems = problems
        self._notes = notes

    # ------------------------------------------------------------ connections

    def base_of(self, name: str) -> str:
        """Return the tensorrt_llm or vLLM model that a model calls. Raises ConfigError."""
        match self._roles[name]:
            case Role.TENSORRT_LLM | Role.VLLM:
                return name
            case Role.ENSEMBLE:
                return self._base_of_ensemble(name)
            case Role.BLS:
                return self._base_of_bls(name)
            case _:
                return self._base_of_part(name)

    def _base_of_ensemble(self, name: str) -> str:
        folder = self._folders[name]
        steps = self.steps(name)
        for step in steps:
            if step in self._problems:
                raise ConfigError(
                    f"{folder.pbtxt}: ensemble '{name}' has a step '{step}', which cannot be "
                    f"served: {self._problems[step]}"
                )
            if step not in self._roles:
                raise ConfigError(
                    f"{folder.pbtxt}: ensemble '{name}' has a step '{step}', which no repository "
                    f"has; there are {', '.join(self._roles)}"
                )
        for role in (Role.TENSORRT_LLM, Role.VLLM):
            for step in steps:
                if self._roles[step] is role:
                    return step
        for step in steps:
            if self._roles[step] is Role.BLS:
                return self._base_of_bls(step)
        raise ConfigError(
            f"{folder.pbtxt}: none of the steps of ensemble '{name}' is a tensorrt_llm or vllm "
            f"model: {', '.join(steps) or 'it has none'}"
        )

    def _base_of_bls(self, name: str) -> str:
        folder = self._folders[name]
        inner = folder.parameters.text(_BLS_INNER) or self._only_base() or _DEFAULT_INNER
        if self._roles.get(inner) is not Role.TENSORRT_LLM:
            raise folder.parameters.error(
                _BLS_INNER,
                f"'{inner}' is not a tensorrt_llm model; there are "
                f"{', '.join(self._bases) or 'none'}",
            )
        return inner

    def _base_of_part(self, name: str) -> str:
        """Return the model of preprocessing or postprocessing.

        An ensemble determines it, or the tokenizer, or there is only one.
        """
        for other in self._roles:
            if self._roles[other] is Role.ENSEMBLE and name in self.steps(other):
                return self._base_of_ensemble(other)
        tokenizer = self._tokenizer_of(self._folders[name])
        if tokenizer is not None:
            for base in self._bases:
                if tokenizer in (
                    str(self._engine_dir(base)),
                    self._tokenizer_of(self._folders[base]),
                ):
                    return base
        only = self._only_base()
        if only is None:
            raise ConfigError(
                f"{self._folders[name].pbtxt}: nothing names the tensorrt_llm model of '{name}': "
                f"there are {', '.join(self._bases) or 'none'}; name it in the steps of an ensemble"
            )
        return only

    def steps(self, ensemble: str) -> list[str]:
        """The models that an ensemble is made of; none of another kind."""
        return [s.model_name for s in self._folders[ensemble].config.ensemble_scheduling.step]

    @property
    def _bases(self) -> list[str]:
        return [name for name, role in self._roles.items() if role is Role.TENSORRT_LLM]

    def _only_base(self) -> str | None:
        return self._bases[0] if len(self._bases) == 1 else None

    # ------------------------------------------------------------ settings

    def layers(self, base: str) -> Iterator[Layer]:
        """Return the layers of one tensorrt_llm model, lowest first. Raises ConfigError."""
        folder = self._folders[base]
        engine = self._engine_dir(base)
        yield from setting_layers(folder, engine, self._notes)
        yield from self._tokenizer_layer(base, engine)

    @functools.cache  # noqa: B019 - a repository is read once
    def _engine_dir(self, base: str) -> Path:
        return find_engine_dir(self._folders[base], self._notes)

    def _tokenizer_layer(self, base: str, engine: Path) -> Iterator[Layer]:
        """Yield the tokenizer of the model, of its preprocessing or of its postprocessing."""
        parts = [
            name
            for name in self._roles
            if self._roles[name] in (Role.PREPROCESSING, Role.POSTPROCESSING, Role.TENSORRT_LLM)
            and self.base_of(name) == base
        ]
        said = [(name, self._tokenizer_of(self._folders[name])) for name in parts]
        written = [(name, tokenizer) for name, tokenizer in said if tokenizer is not None]
        if not written:
            return
        first, tokenizer = written[0]
        for name, other in written:
            if other != tokenizer:
                raise self._folders[name].parameters.error(
                    _TOKENIZER, f"{other} is not {tokenizer}, which '{first}' has: they must agree"
                )
        if tokenizer != str(engine):
            place = self._folders[first].parameters.place(_TOKENIZER)
            yield Layer(place, {"models": {base: {"tokenizer": tokenizer}}})

    def _tokenizer_of(self, folder: ModelFolder) -> str | None:
        """A folder here, or as it is written: perhaps a hub id."""
        written = folder.parameters.text(_TOKENIZER)
        if written is None:
            return None
        found = folder.find_folder(written)
        if found is None and Path(written).is_absolute():
            raise folder.parameters.error(_TOKENIZER, f"there is no folder {written}")
        return written if found is None else str(found)

    # ------------------------------------------------------------ what clients see

    def declaration(self, name: str, notes: Notes) -> ModelDeclaration:
        """Return what clients see of a model. Raises ConfigError."""
        folder, role = self._folders[name], self._roles[name]
        kind, base = KINDS[role], self.base_of(name)
        if role is Role.POSTPROCESSING and all(row.name != LENGTHS for row in folder.config.input):
            kind = POSTPROCESSING_OF_2023
        if role in PART_PARAMETERS:
            check_known(folder, PART_PARAMETERS[role], notes)
            check_served(folder, PART_PARAMETERS[role], notes)
        max_batch_size = folder.config.max_batch_size or self._default_batch_size(base)
        is_decoupled = self._is_decoupled(name, role, base)
        config = completed_config(
            folder, kind, notes, max_batch_size=max_batch_size, is_decoupled=is_decoupled
        )
        return ModelDeclaration(
            name=name,
            kind=kind,
            base_model=base,
            version=folder.version,
            max_batch_size=max_batch_size,
            is_decoupled=is_decoupled,
            config=config,
            options=self._options(folder, role, notes),
        )

    def _default_batch_size(self, base: str) -> int:
        """Where a template was not filled: what the model was built for."""
        return built_batch_size(self._engine_dir(base)) or DEFAULT_MAX_BATCH_SIZE

    def _is_decoupled(self, name: str, role: Role, base: str) -> bool:
        """Return whether a model is decoupled; an unset BLS model is as the model that it calls."""
        config = self._folders[name].config
        if role is Role.ENSEMBLE or (
            role is Role.BLS and "decoupled" in self._folders[name].unfilled
        ):
            config = self._folders[base].config
        return bool(config.model_transaction_policy.decoupled)

    def _options(self, folder: ModelFolder, role: Role, notes: Notes) -> ModelOptions:
        """Return the effects of a model's own parameters. Those of an ensemble and of a BLS are in
        addition those of the models that they call, which may be loaded again with others.
        """
        parameters = folder.parameters
        if role is Role.TENSORRT_LLM:
            logits = declared_datatype(folder, "context_logits")
            return ModelOptions(
                excludes_input=bool(parameters.read(_ROWS["exclude_input_in_output"])),
                is_static=(parameters.text("gpt_model_type") or "").upper() == "V1",
                max_beam_width=parameters.read(_ROWS["max_beam_width"]),
                clamps_token_ids=bool(parameters.read(_ROWS["clamp_token_ids"])),
                logits_datatype=logits or "FP32",
                generation_logits_datatype=declared_datatype(folder, "generation_logits") or "FP32",
                sends_all_outputs=logits is not None
                and declared_datatype(folder, _OUTPUT_OF_MAY_2024) is None,
            )
        is_bls = role is Role.BLS
        return ModelOptions(
            ends_by_default=self._passes_end_id_on(folder, role, notes),
            adds_special_tokens=_word(folder, "add_special_tokens", notes),
            skips_special_tokens=_word(folder, "skip_special_tokens", notes),
            accumulates_tokens=is_bls
            and (parameters.text("accumulate_tokens") or "").lower() in _YES,
            has_draft_model=is_bls and parameters.text("tensorrt_llm_draft_model_name") is not None,
        )

    def _passes_end_id_on(self, folder: ModelFolder, role: Role, notes: Notes) -> bool:
        """Return whether preprocessing prepares an end_id, and whether an ensemble gives
        tensorrt_llm a prepared one. Those from before January 2024 pass on only what clients send.
        """
        passes = True
        if role is Role.PREPROCESSING and folder.config.output:
            passes = any(row.name == _PREPARED_END_ID for row in folder.config.output)
        elif role is Role.ENSEMBLE:
            steps = folder.config.ensemble_scheduling.step
            prepared = {name for step in steps for name in step.output_map.values()}
            passes = all(
                step.input_map.get("end_id") in prepared
                for step in steps
                if self._roles[step.model_name] is Role.TENSORRT_LLM
            )
        if not passes:
            notes.info(
                f"{folder.pbtxt}: '{folder.name}' passes no prepared end_id on: outputs run to "
                "their full length, unless a request has an end_id"
            )
        return passes


def _word(folder: ModelFolder, key: str, notes: Notes) -> bool:
    """Read a switch of the parts with a tokenizer: on, unless it is set to no."""
    written = folder.parameters.text(key)
    if written is not None and written.lower() not in _YES | _NO:
        notes.warning(
            f"{folder.parameters.place(key)}: {key}: {written!r} is neither "
            f"{', '.join(sorted(_YES))} nor {', '.join(sorted(_NO))}: it is taken as true"
        )
    return written is None or written.lower() not in _NO
