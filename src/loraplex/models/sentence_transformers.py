"""Reads what a folder states of vectors: the files of sentence-transformers. Free of torch.

A part that is not computed here is a `problem` of the format: the model still generates text.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from loraplex.core.errors import ConfigError
from loraplex.core.task import PoolKind
from loraplex.core.vector_format import PROMPTS_FILE, TextPrompts, VectorFormat
from loraplex.models.config_fields import ConfigFields, read_fields
from loraplex.models.spec import VectorLayerSpec

_MODULES: Final = "modules.json"
_CONFIG: Final = "config.json"
VECTOR_LAYER_NAME: Final = "model.safetensors"
"""File of a Dense module's tensors."""
TRANSFORMER: Final = "sentence_bert_config.json"
"""File of the first module."""

_KINDS: Final = MappingProxyType(
    {
        "lasttoken": PoolKind.LAST,
        "mean": PoolKind.MEAN,
        "weightedmean": PoolKind.WEIGHTED_MEAN,
        "cls": PoolKind.CLS,
    }
)
"""Kinds by the names of `pooling_mode`; others are not computed here."""
_SWITCHES: Final = MappingProxyType(
    {
        "pooling_mode_cls_token": "cls",
        "pooling_mode_mean_tokens": "mean",
        "pooling_mode_max_tokens": "max",
        "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
        "pooling_mode_weightedmean_tokens": "weightedmean",
        "pooling_mode_lasttoken": "lasttoken",
    }
)
"""Names of `pooling_mode` by the fields that older files have for them."""
_KINDS_OF_CONFIG: Final = MappingProxyType(
    {"avg": PoolKind.MEAN, "cls": PoolKind.CLS, "last": PoolKind.LAST}
)
"""Kinds by the names of `pooling` in config.json, which LlamaBidirectionalModel has."""
_HAS_TANH: Final = MappingProxyType(
    {
        "torch.nn.modules.activation.Tanh": True,
        "torch.nn.modules.linear.Identity": False,
    }
)
"""Functions that may follow a Dense module, by `activation_function`: whether they are tanh."""


def read_vector_format(folder: Path) -> VectorFormat:
    """Read the format of a folder's vectors; the default where it has no such files.

    Raises ConfigError for a broken file.
    """
    prompts = read_prompts(folder)
    limits = optional_fields(folder / TRANSFORMER)
    config = optional_fields(folder / _CONFIG)
    kind, normalizes, problem = _KINDS_OF_CONFIG.get(_pooling_of(config), PoolKind.LAST), True, ""
    includes_prompts = True
    modules = read_modules(folder)
    if modules:
        problem = _order_problem([name for name, _ in modules])
        normalizes = modules[-1][0] == "Normalize"
        if not problem:
            pooling = read_fields(folder / modules[1][1] / _CONFIG)
            kind, problem = _kind(pooling)
            problem = problem or _dense_problem(folder, modules)
            includes_prompts = pooling.boolean("include_prompt", True)
    if "message" in (limits.table("modality_config") or ()):
        problem = problem or (
            f"its texts are rendered by a chat template (modality_config in {TRANSFORMER})"
        )
    if limits.boolean("do_lower_case", False):
        problem = problem or f"its texts are in lower case (do_lower_case in {TRANSFORMER})"
    return VectorFormat(
        kind=kind,
        normalizes=normalizes,
        prompts=prompts,
        includes_prompts=includes_prompts,
        dimensions=config.integers("matryoshka_dimensions"),
        max_tokens=limits.optional_integer("max_seq_length"),
        problem=problem,
    )


def read_vector_layers(folder: Path, hidden_size: int) -> tuple[VectorLayerSpec, ...]:
    """Read the Dense modules of a folder whose vectors are served; in their order.

    hidden_size: length of what they are made from. Raises ConfigError for modules that do not fit
    one another.
    """
    modules = read_modules(folder)
    if not modules or read_vector_format(folder).problem:
        return ()
    layers = []
    for file, layer_folder in _dense_files(folder, modules):
        layer = VectorLayerSpec(
            folder=layer_folder,
            in_features=file.integer("in_features"),
            out_features=file.integer("out_features"),
            has_bias=file.boolean("bias", True),
            has_tanh=_HAS_TANH[_activation(file)],
        )
        if layer.in_features != hidden_size:
            raise ConfigError(
                f"{file.source}: in_features is {layer.in_features}, but the vectors before it "
                f"have {hidden_size} values"
            )
        hidden_size = layer.out_features
        layers.append(layer)
    return tuple(layers)


def vector_files(folder: Path) -> Iterator[Path]:
    """Yield the files that state how a folder's vectors are made, and those of their layers.

    Raises ConfigError for a broken list of modules.
    """
    places = [place for _, place in read_modules(folder) if Path(place) != Path()]
    names = [f"{place}/{name}" for place in places for name in (_CONFIG, VECTOR_LAYER_NAME)]
    for name in (_MODULES, PROMPTS_FILE, TRANSFORMER, *names):
        if (folder / name).is_file():
            yield folder / name


def _dense_files(
    folder: Path, modules: Sequence[tuple[str, str]]
) -> list[tuple[ConfigFields, str]]:
    """Return the config.json of each Dense module, and its folder's name."""
    return [
        (read_fields(folder / place / _CONFIG), place) for name, place in modules if name == "Dense"
    ]


def _activation(file: ConfigFields) -> str:
    return file.text("activation_function", next(iter(_HAS_TANH)))


def _dense_problem(folder: Path, modules: Sequence[tuple[str, str]]) -> str:
    """Return why a Dense module is not computed; empty: all are."""
    for file, place in _dense_files(folder, modules):
        if _activation(file) not in _HAS_TANH:
            known = ", ".join(_HAS_TANH)
            return (
                f"the activation_function {_activation(file)} of {place} is not computed; computed "
                f"are {known}"
            )
        if file.boolean("use_residual", False):
            return f"the residual connection of {place} (use_residual) is not computed"
        for name in ("module_input_name", "module_output_name"):
            if file.text(name, "sentence_embedding") != "sentence_embedding":
                return f"{place} is not for vectors of texts ({name})"
    return ""


def _pooling_of(config: ConfigFields) -> str:
    """Return the field `pooling` of config.json; empty: there is none, or it is no text."""
    pooling = config.values.get("pooling")
    return pooling if isinstance(pooling, str) else ""


def activation_function(folder: Path, config: ConfigFields) -> str:
    """Return the activation function that sentence-transformers names for a head; empty: none.

    Version 6 writes it into a file of its own, earlier ones into config.json.
    """
    name = config.text("sbert_ce_default_activation_function", "")
    own = config.table("sentence_transformers")
    if own is not None:
        name = own.text("activation_fn", name)
    return optional_fields(folder / PROMPTS_FILE).text("activation_fn", name)


def optional_fields(path: Path) -> ConfigFields:
    """Return the fields of a file; none without it."""
    return read_fields(path) if path.is_file() else ConfigFields({}, str(path))


def read_modules(folder: Path) -> list[tuple[str, str]]:
    """Return the modules in their order: the last part of the type, and the path; or none."""
    path = folder / _MODULES
    if not path.is_file():
        return []
    try:
        entries: Any = json.loads(path.read_text(encoding="utf-8"))
        modules = [
            (str(entry["type"]).rpartition(".")[2], str(entry["path"]))
            for entry in sorted(entries, key=lambda entry: int(entry["idx"]))
        ]
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ConfigError(
            f"{path} must be a list of objects with idx, type and path: {error!r}"
        ) from error
    strange = [
        place
        for _, place in modules
        if Path(place).is_absolute() or ".." in place or not place.isprintable()
    ]
    if not modules or strange:
        shown = f", got {strange[0]!r}" if strange else ""
        raise ConfigError(f"{path} must name folders within its own{shown}")
    return modules


def _order_problem(names: list[str]) -> str:
    """Return why modules are not what is computed here.

    That is a decoder, a pooling, perhaps Dense modules, perhaps a norm.
    """
    known = ("Transformer", "Pooling", "Dense", "Normalize")
    strange = [name for name in names if name not in known]
    if strange:
        return f"the module {strange[0]} of {_MODULES} is not computed"
    rest = [name for name in names if name != "Dense"]
    last_dense = max((index for index, name in enumerate(names) if name == "Dense"), default=1)
    is_ordered = names[:2] == ["Transformer", "Pooling"] and last_dense <= names.count("Dense") + 1
    if not is_ordered or tuple(rest) not in (("Transformer", "Pooling"), known[:2] + known[3:]):
        return f"modules in the order {', '.join(names)} ({_MODULES}) are not computed"
    return ""


def _kind(pooling: ConfigFields) -> tuple[PoolKind, str]:
    """Return the kind of a Pooling's file; or LAST and a problem."""
    if isinstance(pooling.values.get("pooling_mode"), str):
        names: Sequence[str] = (pooling.text("pooling_mode", ""),)
    else:
        names = pooling.texts("pooling_mode")
    if not names:
        names = [
            name
            for field, name in _SWITCHES.items()
            if pooling.boolean(field, field == "pooling_mode_mean_tokens")
        ]
    if len(names) != 1:
        return PoolKind.LAST, f"it joins {len(names)} kinds of pooling ({', '.join(names)})"
    if names[0] not in _KINDS:
        return PoolKind.LAST, f"pooling of the kind {names[0]} is not computed"
    return _KINDS[names[0]], ""


def read_prompts(folder: Path) -> TextPrompts:
    """Read the prompts of a folder; none without the file. Raises ConfigError."""
    fields = optional_fields(folder / PROMPTS_FILE)
    table = fields.table("prompts")
    texts = {} if table is None else {name: table.text(name, "") for name in table}
    default = fields.text("default_prompt_name", "")
    if default and default not in texts:
        raise ConfigError(
            f"{fields.source}: default_prompt_name {default!r} is none of its prompts: "
            f"{', '.join(texts) or 'there are none'}"
        )
    return TextPrompts(texts, default)
