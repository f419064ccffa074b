"""A PEFT folder from the normal form: the other direction of `peft`. Bit-exact.

PEFT has one rank and one alpha, and patterns for what differs. As alpha is scale times rank, the
scale comes back exactly when PEFT divides: a float32 times a small integer is exact in float64, in
which JSON carries it. Writes no file.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from loraplex.adapters.formats.export import module_path
from loraplex.adapters.normal import NormalRow
from loraplex.adapters.tensor_file import RawTensor
from loraplex.core.errors import InvalidAdapterError

_T = TypeVar("_T", int, float)


def peft_tensors(rows: Sequence[NormalRow]) -> dict[str, RawTensor]:
    """The tensors by PEFT's names. Raises UnsupportedFeatureError for a row that is no LoRA."""
    tensors = {}
    for row in rows:
        prefix = f"base_model.model.{module_path(row)}"
        tensors[f"{prefix}.lora_A.weight"] = row.tensors["a"]
        tensors[f"{prefix}.lora_B.weight"] = row.tensors["b"]
    return tensors


def peft_config(rows: Sequence[NormalRow], base_model: str | None = None) -> dict[str, Any]:
    """adapter_config.json for these rows; base_model is the base's name, if it is known."""
    if not rows:
        raise InvalidAdapterError("the adapter has no rows")
    ranks = {module_path(row): row.tensors["a"].shape[0] for row in rows}
    alphas = {module_path(row): row.scale * row.tensors["a"].shape[0] for row in rows}
    rank, rank_pattern = _with_exceptions(ranks)
    alpha, alpha_pattern = _with_exceptions(alphas)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": rank,
        "lora_alpha": _number(alpha),
        "rank_pattern": rank_pattern,
        "alpha_pattern": {path: _number(value) for path, value in alpha_pattern.items()},
        "use_rslora": False,
        "target_modules": _target_modules(rows),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "modules_to_save": None,
        "inference_mode": True,
    }


def _with_exceptions(values: Mapping[str, _T]) -> tuple[_T, dict[str, _T]]:
    """The most frequent value, and the paths that have another one."""
    (common, _), *_ = Counter(values.values()).most_common(1)
    return common, {path: value for path, value in values.items() if value != common}


def _target_modules(rows: Sequence[NormalRow]) -> list[str]:
    """Names if every layer up to the last has each of them, else the paths themselves."""
    modules = sorted({row.module for row in rows})
    num_layers = 1 + max(row.layer or 0 for row in rows)
    paths = sorted({module_path(row) for row in rows})
    return modules if len(paths) == num_layers * len(modules) else paths


def _number(value: float) -> int | float:
    """An integer where it is one: some readers of the file expect that."""
    return int(value) if value == int(value) else value
