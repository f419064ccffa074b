"""Reader of PEFT's adapter_config.json: the keys that change the mathematics.

Matching and scaling follow PEFT's LoRA (peft.tuners.lora and tuners_utils, 0.19 to 0.21). An
unknown key, or a feature that cannot be applied, is refused by name: an adapter is served exactly
or not at all.
"""

import functools
import math
import reprlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from loraplex.adapters.formats.patterns import Matcher
from loraplex.adapters.tensor_file import read_bounded
from loraplex.core.adapter import EMBEDDING, LM_HEAD
from loraplex.core.errors import InvalidAdapterError, LoraplexError, UnsupportedFeatureError
from loraplex.core.module_names import without_wrappers

CONFIG_NAME = "adapter_config.json"
_LINEAR_LAYERS = "all-linear"
_TIED = {EMBEDDING: LM_HEAD, LM_HEAD: EMBEDDING}

# Keys without effect once the adapter is trained (peft_type is checked separately).
_HARMLESS = frozenset(
    (
        "corda_config",
        "eva_config",
        # PEFT itself sets it as the layer needs, with a warning: true for GPT-2's Conv1D, false for
        # a torch Linear or Embedding. A and B have the same shapes both ways.
        "fan_in_fan_out",
        "inference_mode",
        "loftq_config",
        "lora_dropout",
        "lora_ga_config",
        "megatron_core",
        "merge_weights",
        "peft_type",
        "qalora_group_size",
        "revision",
        "runtime_config",
        "task_type",
    )
)

# The feature that a key needs with any value other than its default.
_UNSUPPORTED: dict[str, tuple[Any, str]] = {
    "megatron_config": (None, "Megatron's parallel layers"),
    "layer_replication": (None, "replicated decoder layers"),
    "alora_invocation_tokens": (None, "LoRA that begins within a prompt (aLoRA)"),
    "use_qalora": (False, "QALoRA's pooled inputs"),
    "use_bdlora": (None, "block-diagonal LoRA"),
    "arrow_config": (None, "Arrow routing"),
    "kasa_config": (None, "KaSA's singular values"),
    "velora_config": (None, "VeLoRA"),
    "monteclora_config": (None, "MonteCLoRA"),
    "enable_lora": (None, "LoRA of a part of a fused projection"),
}

_PARAMETERS = ("gate_up_proj", "gate_proj", "up_proj", "down_proj", "weight")
"""Last names of the parameters that target_parameters may name."""

# With these initialisations PEFT changes the base's weights whenever it builds the layer, also when
# it loads a trained adapter.
_SUBTRACTED = (
    "make it a plain LoRA: after the training, call model.save_pretrained(folder, "
    "path_initial_model_for_weight_conversion=initial), with the folder of the untrained adapter"
)
_CONVERSIONS = {
    **dict.fromkeys(
        ("pissa", "olora"),
        f"{_SUBTRACTED}, which can be made again from the base model (docs/adapters.md, PEFT "
        "features)",
    ),
    **dict.fromkeys(("corda", "lora_ga"), _SUBTRACTED),
    "loftq": "serve the base model that LoftQ quantised and saved, and set init_lora_weights to "
    "true in adapter_config.json",
}
"""What makes an adapter of such an initialisation a plain one."""
_PLAIN_INITS = (True, False, None, "gaussian", "eva", "orthogonal", "mica")
_WITH_NAMES = (
    *("target_modules", "exclude_modules", "modules_to_save", "target_parameters"),
    *("rank_pattern", "alpha_pattern"),
)
"""Fields with names of modules, or patterns of them."""
_BIAS_CHOICES = ("none", "all", "lora_only")
_EMPTY: tuple[Any, ...] = (None, False, "", [], {})
_LARGEST_SCALE = float(np.finfo(np.float32).max)
_LARGEST_INTEGER = 2**31 - 1

_SHORT = reprlib.Repr()
"""Shows a value of the file in an error: it may be large, or nested deeply."""
_SHORT.maxstring = _SHORT.maxother = 200


class LoraSettings(NamedTuple):
    """What the config has for the LoRA of one module."""

    is_targeted: bool
    rank: int
    scale: float
    """Alpha / rank, or alpha / sqrt(rank) of rank-stabilised LoRA (arXiv:2312.03732)."""


class PeftConfig(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Contents of adapter_config.json that concern the weights."""

    r: int = 8
    lora_alpha: float = 8
    use_rslora: bool = False
    rank_pattern: dict[str, int] = {}
    alpha_pattern: dict[str, float] = {}
    target_modules: str | list[str] | None = None
    exclude_modules: str | list[str] | None = None
    layers_to_transform: int | list[int] | None = None
    layers_pattern: str | list[str] | None = None
    base_model_name_or_path: str | None = None
    bias: str = "none"
    lora_bias: bool = False
    use_dora: bool = False
    modules_to_save: list[str] = []
    trainable_token_indices: list[int] | dict[str, list[int]] = []
    ensure_weight_tying: bool = False
    target_parameters: list[str] = []
    auto_mapping: Any = None
    peft_version: str | None = None
    b_layout: Literal["rank_major", "grouped_by_expert"] | None = msgspec.field(
        default=None, name="lora_B_layout"
    )
    """Order of the columns of a lora_B of all experts, which Unsloth writes."""

    def settings_of(self, module_path: str) -> LoraSettings:
        """Return the settings of a module, such as model.layers.0.self_attn.q_proj, or parameter.

        Patterns match the name of a target parameter, such as model.layers.0.mlp.gate.weight.
        """
        weight = f"{module_path}.weight"
        path = weight if self.targets_parameter(weight) else module_path
        with self._matcher.limited():
            rank = self.rank_pattern.get(self._matching(self.rank_pattern, path), self.r)
            alpha = self.alpha_pattern.get(
                self._matching(self.alpha_pattern, path), self.lora_alpha
            )
            scale = alpha / (math.sqrt(rank) if self.use_rslora else rank)
            if abs(scale) > _LARGEST_SCALE:
                raise InvalidAdapterError(
                    f"the scale of {module_path} is {scale:g} (alpha {alpha:g}, rank {rank}); it "
                    f"is computed in float32, which holds at most {_LARGEST_SCALE:g}"
                )
            return LoraSettings(self.targets(module_path), rank, float(np.float32(scale)))

    def targets_parameter(self, path: str) -> bool:
        """Whether PEFT would put LoRA on this parameter by target_parameters."""
        return any(path == name or path.endswith(f".{name}") for name in self.target_parameters)

    @property
    def is_of_unsloth(self) -> bool:
        """Whether Unsloth saved the adapter."""
        mapping = self.auto_mapping
        return isinstance(mapping, dict) and bool(mapping.get("unsloth_fixed"))

    def targets(self, module_path: str) -> bool:
        """Whether PEFT would put LoRA on this module.

        A tied embedding and output layer count as one if ensure_weight_tying is set.
        """
        if self._targets(module_path) or any(
            map(self.targets_parameter, (module_path, f"{module_path}.weight"))
        ):
            return True
        twin = _TIED.get(module_path.rpartition(".")[2])
        # PEFT itself writes the whole path of an embedding that it ties: model.embed_tokens.
        return (
            self.ensure_weight_tying
            and twin is not None
            and any(
                self._targets(path) for path in (twin, f"model.{twin}", *self._full_paths(twin))
            )
        )

    def _full_paths(self, module: str) -> Sequence[str]:
        """Return the entries of target_modules that are paths to a module of this name."""
        names = self.target_modules if isinstance(self.target_modules, list) else []
        return [name for name in names if name.endswith(f".{module}")]

    def saves(self, module_path: str) -> bool:
        """Whether PEFT would train a copy of this module (modules_to_save).

        A name counts if it ends the path, within a word too: "norm" is every layer norm.
        """
        if any(module_path.endswith(name) for name in self.modules_to_save):
            return True
        twin = _TIED.get(module_path.rpartition(".")[2], "")
        names = (name.rpartition(".")[2] for name in self.modules_to_save)
        return self.ensure_weight_tying and twin in names

    def token_indices(self, module: str) -> list[int]:
        """Return the trained rows of embed_tokens or lm_head; a list means the embedding."""
        indices = self.trainable_token_indices
        if isinstance(indices, list):
            return indices if module == EMBEDDING else []
        return next(
            (rows for name, rows in indices.items() if name.rpartition(".")[2] == module), []
        )

    @property
    def modules_with_tokens(self) -> list[str]:
        """Return which of embed_tokens and lm_head have trained rows."""
        return [module for module in _TIED if self.token_indices(module)]

    def excludes(self, module_path: str) -> bool:
        """Whether PEFT leaves this module out though target_modules may name it."""
        if self.exclude_modules and self._names(self.exclude_modules, module_path):
            return True
        return any(
            self._matcher.match(rf"(^|.*\.){name}($|\..*)", module_path)
            for name in self.modules_to_save
        )

    def _targets(self, module_path: str) -> bool:
        if self.excludes(module_path):
            return False
        if self.target_modules is None:
            return True
        if isinstance(self.target_modules, str):
            if self.target_modules.lower() == _LINEAR_LAYERS:
                return module_path.rpartition(".")[2] not in _TIED
            return self._names(self.target_modules, module_path)
        if module_path in self.target_modules:
            return True
        return self._names(self.target_modules, module_path) and self._transforms_layer(module_path)

    def _transforms_layer(self, module_path: str) -> bool:
        wanted = self.layers_to_transform
        if wanted is None or wanted == []:
            return True
        patterns = self.layers_pattern or [r"[^.]*"]
        for pattern in [patterns] if isinstance(patterns, str) else patterns:
            found = self._matcher.match(rf"(?:^|.*?\.){pattern}\.(?P<index>\d+)\.", module_path)
            if found:
                index = int(found.group("index"))
                return index in ([wanted] if isinstance(wanted, int) else wanted)
        return False

    @functools.cached_property
    def _matcher(self) -> Matcher:
        return Matcher()

    def check_patterns(self) -> None:
        """Raise InvalidAdapterError for a pattern that is not a regular expression."""
        patterns = [*self.rank_pattern, *self.alpha_pattern, *self.modules_to_save]
        for value in (self.target_modules, self.exclude_modules, self.layers_pattern):
            if isinstance(value, str):
                patterns.append(value)
        if isinstance(self.layers_pattern, list):
            patterns += self.layers_pattern
        for pattern in patterns:
            self._matcher.compile(pattern)

    def _matching(self, patterns: dict[str, Any], module_path: str) -> str:
        """Return the first pattern that matches the path's end after a dot, or all of it."""
        for pattern in patterns:
            if self._matcher.match(rf"(.*\.)?({pattern})$", module_path):
                return pattern
        return module_path

    def _names(self, names: str | list[str], module_path: str) -> bool:
        """Whether a regular expression matches the whole path, or a name its end."""
        if isinstance(names, str):
            return self._matcher.fullmatch(names, module_path) is not None
        return any(module_path == name or module_path.endswith(f".{name}") for name in names)


_KNOWN = _HARMLESS | set(PeftConfig.__struct_encode_fields__)


def read_config(folder: Path, max_bytes: int) -> PeftConfig:
    """Read and check a folder's adapter_config.json.

    Raises InvalidAdapterError if it is missing or broken, UnsupportedFeatureError for features
    that are not served.
    """
    path = folder / CONFIG_NAME
    if not path.exists():
        raise InvalidAdapterError(f"{folder} is not a PEFT adapter: it has no {CONFIG_NAME}")
    try:
        return parse_config(bytes(read_bounded(path, max_bytes)))
    except LoraplexError as error:
        raise type(error)(f"{path}: {error.message}") from error


def parse_config(content: bytes) -> PeftConfig:
    """Parse the bytes of the file. Raises as read_config."""
    try:
        values = msgspec.json.decode(content, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidAdapterError(f"not a JSON object: {error}") from error
    _refuse_unsupported(values)
    if isinstance(values.get("trainable_token_indices"), dict):
        _refuse_other_tokens(values["trainable_token_indices"])
    for key in ("r", "lora_alpha"):
        if values.get(key, 0) is None:
            raise InvalidAdapterError(f"{key} is null; it must be a number, as for PEFT")
    known = {
        key: value
        for key, value in values.items()
        if key in PeftConfig.__struct_encode_fields__ and value is not None
    }
    try:
        config = _without_wrappers(msgspec.convert(known, PeftConfig))
    except msgspec.ValidationError as error:
        raise InvalidAdapterError(str(error)) from error
    _check_values(config)
    _check_switches(config)
    return config


def _without_wrappers(config: PeftConfig) -> PeftConfig:
    """Return the config with names of modules as the tensors' are read."""

    def plain(value: Any) -> Any:
        if isinstance(value, str):
            return without_wrappers(value)
        if isinstance(value, list):
            return [plain(item) for item in value]
        return {plain(name): item for name, item in value.items()} if value else value

    return msgspec.structs.replace(
        config, **{field: plain(getattr(config, field)) for field in _WITH_NAMES}
    )


def _refuse_unsupported(values: dict[str, Any]) -> None:
    peft_type = values.get("peft_type")
    if peft_type != "LORA":
        raise UnsupportedFeatureError(
            f"peft_type is {_SHORT.repr(peft_type)}; only 'LORA' is served"
        )
    for key, value in values.items():
        if key in _UNSUPPORTED:
            default, needed = _UNSUPPORTED[key]
            if value != default and value not in _EMPTY:
                raise UnsupportedFeatureError(
                    f"{key} = {_SHORT.repr(value)} needs {needed}, which is not served"
                )
        elif key == "init_lora_weights":
            _refuse_base_changing_init(value)
        elif key not in _KNOWN and value not in _EMPTY:
            raise UnsupportedFeatureError(
                f"{key[: _SHORT.maxstring]} = {_SHORT.repr(value)} is unknown, and so is its effect"
            )


def _refuse_other_tokens(indices: dict[str, object]) -> None:
    for name in indices:
        if name.rpartition(".")[2] not in _TIED:
            raise UnsupportedFeatureError(
                f"trainable_token_indices names {_SHORT.repr(name)}; token rows are those of "
                f"{EMBEDDING} or {LM_HEAD}"
            )


def _refuse_base_changing_init(value: object) -> None:
    name = value.lower() if isinstance(value, str) else ""
    conversion = next((text for init, text in _CONVERSIONS.items() if name.startswith(init)), None)
    if conversion is not None:
        raise UnsupportedFeatureError(
            f"init_lora_weights = {_SHORT.repr(value)} changes the base model's weights, which all "
            f"adapters share; {conversion}"
        )
    if not isinstance(value, bool | str | None) or value not in _PLAIN_INITS:
        raise UnsupportedFeatureError(
            f"init_lora_weights = {_SHORT.repr(value)} is unknown, and so is its effect"
        )


def _check_switches(config: PeftConfig) -> None:
    for name in config.target_parameters:
        if name.rpartition(".")[2] not in _PARAMETERS:
            raise UnsupportedFeatureError(
                f"target_parameters names {_SHORT.repr(name)}; supported: {', '.join(_PARAMETERS)}"
            )
    if config.bias not in _BIAS_CHOICES:
        raise InvalidAdapterError(
            f"bias is {_SHORT.repr(config.bias)}; it is one of {', '.join(_BIAS_CHOICES)}"
        )
    if config.use_dora and config.lora_bias:
        raise InvalidAdapterError("use_dora and lora_bias exclude each other, in PEFT too")
    for module in (EMBEDDING, LM_HEAD):
        indices = config.token_indices(module)
        is_in_range = all(0 <= index <= _LARGEST_INTEGER for index in indices)
        if len(set(indices)) < len(indices) or not is_in_range:
            raise InvalidAdapterError(
                f"trainable_token_indices of {module} must be different token ids, got "
                f"{_SHORT.repr(indices)}"
            )


def _check_values(config: PeftConfig) -> None:
    for name, rank in {"r": config.r, **config.rank_pattern}.items():
        if not 1 <= rank <= _LARGEST_INTEGER:
            raise InvalidAdapterError(
                f"the rank of {_SHORT.repr(name)} must be at least 1 and at most "
                f"{_LARGEST_INTEGER}, got {_SHORT.repr(rank)}"
            )
    for name, alpha in {"lora_alpha": config.lora_alpha, **config.alpha_pattern}.items():
        if not math.isfinite(alpha):
            raise InvalidAdapterError(
                f"the alpha of {_SHORT.repr(name)} must be finite, got {alpha}"
            )
    config.check_patterns()
