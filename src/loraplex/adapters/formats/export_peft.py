"""Bit-exact export of the canonical form to a PEFT folder, the inverse of `peft`.

PEFT has one rank and one alpha, and patterns for modules that differ. As alpha is scale times rank,
PEFT's division restores the scale exactly: a float32 times a small integer is exact in float64,
which JSON uses. This module writes no file.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from loraplex.adapters.canonical import CanonicalRow, RowKind
from loraplex.adapters.formats.modules import ROUTER, is_of_experts, linear_path
from loraplex.adapters.formats.peft_names import (
    NORMS,
    OF_FIRST_LAYER,
    is_of_other_root,
    parameter_path,
)
from loraplex.adapters.tensor_file import RawTensor
from loraplex.core.adapter import EMBEDDING, SCORE
from loraplex.core.errors import InvalidAdapterError, UnsupportedFeatureError

_T = TypeVar("_T", int, float)
_EXPERTS = "experts."
"""Beginning of the names of modules that each expert has."""


def peft_tensors(rows: Sequence[CanonicalRow]) -> dict[str, RawTensor]:
    """Return the tensors by PEFT's names, those of an expert by its number.

    Raises UnsupportedFeatureError for an expert of a module that experts do not have.
    """
    wrapped = {_path(row) for row in rows if row.kind is RowKind.LORA}
    return {
        f"base_model.model.{_path(row)}.{slot}": tensor
        for row in rows
        for slot, tensor in _slots(row, is_wrapped=_path(row) in wrapped).items()
    }


def peft_config(rows: Sequence[CanonicalRow], base_model: str | None = None) -> dict[str, Any]:
    """Return adapter_config.json for these rows; base_model is the base's name, if known.

    Raises InvalidAdapterError if there is no LoRA, UnsupportedFeatureError for a mixture of modules
    with and without DoRA, or with and without a bias of lora_B: PEFT has one switch for all.
    """
    lora = [row for row in rows if row.kind is RowKind.LORA]
    if not lora:
        raise InvalidAdapterError("the adapter has no rows of LoRA, which PEFT needs")
    ranks = {_path(row): row.tensors["a"].shape[0] for row in lora}
    alphas = {_path(row): row.scale * row.tensors["a"].shape[0] for row in lora}
    rank, rank_pattern = _with_exceptions(ranks)
    alpha, alpha_pattern = _with_exceptions(alphas)
    scaled = {_path(row) for row in rows if row.kind is RowKind.MAGNITUDE}
    biased = {_path(row) for row in lora if "bias" in row.tensors}
    return {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if any(row.module == SCORE for row in rows) else "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": rank,
        "lora_alpha": _number(alpha),
        "rank_pattern": rank_pattern,
        "alpha_pattern": {path: _number(value) for path, value in alpha_pattern.items()},
        "use_rslora": False,
        "use_dora": _switch("DoRA's magnitude vector", set(ranks), scaled),
        "lora_bias": _switch("a bias of lora_B", set(ranks), biased),
        "target_modules": _target_modules(lora),
        "lora_dropout": 0.0,
        "bias": _bias(rows, set(ranks)),
        "fan_in_fan_out": False,
        "modules_to_save": [
            _path(row) for row in rows if row.kind is RowKind.FULL and "weight" in row.tensors
        ]
        or None,
        "trainable_token_indices": {
            row.module: row.tensors["indices"].integers().tolist()
            for row in rows
            if row.kind is RowKind.TOKENS
        }
        or None,
        "inference_mode": True,
    }


def _path(row: CanonicalRow) -> str:
    """Return the Hugging Face path, in a causal LM, of the module that a row changes."""
    if row.expert is not None and not row.module.startswith(_EXPERTS):
        raise UnsupportedFeatureError(
            f"{row.origin} is of expert {row.expert} of {row.module}, which experts do not have"
        )
    is_plain = not is_of_other_root(row.origin)
    if row.layer is None or (row.module == OF_FIRST_LAYER and is_plain):
        return parameter_path(row.module)
    if row.module in NORMS[:2]:
        return f"model.layers.{row.layer}.{row.module}"
    inner = row.origin.partition(f"layers.{row.layer}.")[2]
    is_known = row.expert is None or f"{_EXPERTS}{row.expert}." in inner
    if is_known and not is_plain:
        return row.origin
    if is_known and inner:
        return f"model.layers.{row.layer}.{inner}"
    return linear_path(row.layer, row.module).replace("{expert}", str(row.expert))


def _slots(row: CanonicalRow, *, is_wrapped: bool) -> dict[str, RawTensor]:
    """Return a row's tensors by PEFT's names within the module.

    is_wrapped: the module has LoRA, so the base's own parameters are one level deeper.
    """
    tensors, own = row.tensors, "base_layer." if is_wrapped else ""
    match row.kind:
        case RowKind.LORA if row.module == EMBEDDING:
            return {"lora_embedding_A": tensors["a"], "lora_embedding_B": tensors["b"]}
        case RowKind.LORA:
            slots = {"lora_A.weight": tensors["a"], "lora_B.weight": tensors["b"]}
            return slots | ({"lora_B.bias": tensors["bias"]} if "bias" in tensors else {})
        case RowKind.MAGNITUDE if "factor" in tensors:
            raise UnsupportedFeatureError(
                f"{row.origin} has DoRA's magnitudes divided by the norms of the base's weight: "
                "PEFT needs them as they were trained"
            )
        case RowKind.MAGNITUDE:
            return {"lora_magnitude_vector": tensors["magnitude"]}
        case RowKind.BIAS:
            return {f"{own}bias": tensors["bias"]}
        case RowKind.FULL if "weight" in tensors:
            return {"weight": tensors["weight"]}
        case RowKind.FULL:
            return {f"{own}weight": tensors["base"]}
        case RowKind.TOKENS:
            return {"token_adapter.trainable_tokens_delta": tensors["weight"]}


def _switch(what: str, paths: set[str], with_it: set[str]) -> bool:
    """Return a property of all modules or of none; raise if only some have it."""
    if with_it and with_it != paths:
        raise UnsupportedFeatureError(
            f"{min(with_it)} has {what}, {min(paths - with_it)} has not: PEFT has one switch for "
            "all modules"
        )
    return bool(with_it)


def _bias(rows: Sequence[CanonicalRow], with_lora: set[str]) -> str:
    copied = {_path(row) for row in rows if row.kind is RowKind.FULL}
    paths = {_path(row) for row in rows if row.kind is RowKind.BIAS} - copied
    if not paths:
        return "none"
    return "lora_only" if paths <= with_lora else "all"


def _with_exceptions(values: Mapping[str, _T]) -> tuple[_T, dict[str, _T]]:
    """Return the most frequent value, and the paths with another one."""
    (common, _), *_ = Counter(values.values()).most_common(1)
    return common, {path: value for path, value in values.items() if value != common}


def _target_modules(rows: Sequence[CanonicalRow]) -> list[str]:
    """Return module names if every layer, and every expert, has each of them, else the paths."""
    ends = sorted({row.module for row in rows if row.layer is None})
    places: dict[str, set[tuple[int, int | None]]] = defaultdict(set)
    names: dict[str, str] = {}
    paths: set[str] = set()
    for row in rows:
        if row.layer is not None:
            path = _path(row)
            places[row.module].add((row.layer, row.expert))
            names[row.module] = _short_name(row.module, path)
            paths.add(path)
    found = [place for of_module in places.values() for place in of_module]
    num_layers = 1 + max((layer for layer, _ in found), default=-1)
    of_experts = {
        layer for module in places if is_of_experts(module) for layer, _ in places[module]
    }
    num_experts = 1 + max((expert for _, expert in found if expert is not None), default=0)
    is_complete = all(
        len(of_module)
        == (len(of_experts) if is_of_experts(module) else num_layers)
        * (num_experts if module.startswith(_EXPERTS) else 1)
        for module, of_module in places.items()
    )
    return sorted(set(names.values()) if is_complete else paths) + ends


def _short_name(module: str, path: str) -> str:
    """Return a name that only paths of this module end with, if they have one."""
    if module.startswith(_EXPERTS) or module == ROUTER:
        return path.rpartition(".")[2]
    return ".".join(path.split(".")[-1 - module.count(".") :])


def _number(value: float) -> int | float:
    """Return an integer where possible, since some readers of the file expect one."""
    return int(value) if value == int(value) else value
