"""LoRA folders of PEFT: adapter_config.json and adapter_model.safetensors (or .bin).

Converts their tensors into canonical rows. Every tensor must be applied, otherwise the load is
refused with the tensor's name. The slots have PEFT's meaning (peft.tuners.lora.layer, lora.dora,
trainable_tokens, 0.19 to 0.21): adapter_config.json must imply each of them. Files are read
elsewhere.
"""

import itertools
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from loraplex.adapters.canonical import CanonicalRow, RowKind, sort_rows
from loraplex.adapters.formats.modules import EXPERT_MODULES
from loraplex.adapters.formats.peft_config import CONFIG_NAME, PeftConfig
from loraplex.adapters.formats.peft_experts import stacked_rows
from loraplex.adapters.formats.peft_names import CLASSIFIERS, PeftSlot, TensorName, parse_name
from loraplex.adapters.shapes import BaseShapes
from loraplex.adapters.tensor_file import FLOAT_TYPES, RawTensor
from loraplex.core.adapter import EMBEDDING, LM_HEAD
from loraplex.core.errors import InvalidAdapterError, UnsupportedFeatureError

_NUM_DIMENSIONS = {
    PeftSlot.A: 2,
    PeftSlot.B: 2,
    PeftSlot.B_BIAS: 1,
    PeftSlot.MAGNITUDE: 1,
    PeftSlot.BIAS: 1,
    PeftSlot.BASE_WEIGHT: 2,
    PeftSlot.BASE_BIAS: 1,
    PeftSlot.TOKENS: 2,
}
_COPIED_BY_ITSELF = (EMBEDDING, LM_HEAD)
"""Modules that PEFT saves without a key in the config: if they are targets, or if the vocabulary
was resized."""


_SAVED_TWICE = (PeftSlot.WEIGHT, PeftSlot.BIAS)
"""Slots that PEFT saves once more, as modules_to_save.weight, if the vocabulary was resized."""


class PeftModule:
    """Collector of one module's tensors. Call `rows` at the end."""

    def __init__(self, path: str, layer: int | None, module: str, expert: int | None) -> None:
        self._path = path
        self._layer = layer
        self._module = module
        self._expert = expert
        self._tensors: dict[PeftSlot, RawTensor] = {}
        self._names: dict[PeftSlot, str] = {}

    def add(self, slot: PeftSlot, name: str, tensor: RawTensor) -> None:
        """Add a tensor. Raises InvalidAdapterError for a duplicate slot or a wrong shape."""
        if slot in self._tensors:
            if slot in _SAVED_TWICE and tensor.equals(self._tensors[slot]):
                return
            raise InvalidAdapterError(
                f"tensors {self._names[slot]!r} and {name!r} are both {slot.value} of one module"
            )
        dimensions = _NUM_DIMENSIONS.get(slot, 1 if self._is_norm else 2)
        if len(tensor.shape) != dimensions or 0 in tensor.shape:
            needed = "a vector" if dimensions == 1 else "a matrix with at least one row and column"
            raise InvalidAdapterError(
                f"tensor {name!r} has shape {list(tensor.shape)}; {needed} is needed"
            )
        self._tensors[slot], self._names[slot] = tensor, name

    def rows(self, config: PeftConfig) -> list[CanonicalRow]:
        """Return the rows. Raises InvalidAdapterError, UnsupportedFeatureError."""
        rows = []
        if not self._tensors.keys().isdisjoint(
            (PeftSlot.A, PeftSlot.B, PeftSlot.B_BIAS, PeftSlot.MAGNITUDE)
        ):
            rows.append(self._lora(config))
        if PeftSlot.MAGNITUDE in self._tensors:
            rows.append(self._magnitude())
        rows += [
            self._bias(config, slot)
            for slot in (PeftSlot.BIAS, PeftSlot.BASE_BIAS)
            if slot in self._tensors
        ]
        if not self._tensors.keys().isdisjoint((PeftSlot.WEIGHT, PeftSlot.BASE_WEIGHT)):
            rows.append(self._full(config))
        if PeftSlot.TOKENS in self._tensors:
            rows.append(self._tokens(config))
        return rows

    @property
    def _is_norm(self) -> bool:
        return "norm" in self._module or self._module.startswith("ln_")

    def _lora(self, config: PeftConfig) -> CanonicalRow:
        a, b = self._pair()
        name = self._names[PeftSlot.A]
        settings = config.settings_of(self._path)
        if not settings.is_targeted:
            raise InvalidAdapterError(
                f"tensor {name!r} is of a module that {CONFIG_NAME} does not target"
            )
        if settings.rank != a.shape[0]:
            raise InvalidAdapterError(
                f"tensor {name!r} has rank {a.shape[0]}; {CONFIG_NAME} has {settings.rank}"
            )
        tensors = {"a": a, "b": b}
        self._check_flag("use_dora", config.use_dora, PeftSlot.MAGNITUDE)
        if self._module != EMBEDDING:
            self._check_flag("lora_bias", config.lora_bias, PeftSlot.B_BIAS)
        if PeftSlot.B_BIAS in self._tensors:
            tensors["bias"] = self._vector(PeftSlot.B_BIAS, b.shape[0])
        return self._row(RowKind.LORA, tensors, settings.scale)

    def _pair(self) -> tuple[RawTensor, RawTensor]:
        a, b = self._tensors.get(PeftSlot.A), self._tensors.get(PeftSlot.B)
        if a is None or b is None:
            missing, name = "B" if b is None else "A", next(iter(self._names.values()))
            raise InvalidAdapterError(f"tensor {name!r} has no lora_{missing} to go with it")
        if a.shape[0] != b.shape[1]:
            raise InvalidAdapterError(
                f"tensors {self._names[PeftSlot.A]!r} {list(a.shape)} and "
                f"{self._names[PeftSlot.B]!r} {list(b.shape)} have different ranks: "
                f"{a.shape[0]} and {b.shape[1]}"
            )
        return a, b

    def _check_flag(self, key: str, is_set: bool, slot: PeftSlot) -> None:
        """Refuse tensors that contradict the config."""
        if is_set and slot not in self._tensors:
            raise InvalidAdapterError(
                f"{CONFIG_NAME} sets {key}, but {self._names[PeftSlot.A]!r} has no {slot.value} to "
                "go with it"
            )
        if not is_set and slot in self._tensors:
            raise InvalidAdapterError(
                f"tensor {self._names[slot]!r} needs {key}, which {CONFIG_NAME} does not set"
            )

    def _magnitude(self) -> CanonicalRow:
        name = self._names[PeftSlot.MAGNITUDE]
        if self._module == EMBEDDING:
            raise UnsupportedFeatureError(
                f"tensor {name!r} needs DoRA of the token embedding, which is not served"
            )
        magnitude = self._vector(PeftSlot.MAGNITUDE, self._tensors[PeftSlot.B].shape[0])
        return self._row(RowKind.MAGNITUDE, {"magnitude": magnitude})

    def _vector(self, slot: PeftSlot, length: int) -> RawTensor:
        vector = self._tensors[slot]
        if vector.shape != (length,):
            raise InvalidAdapterError(
                f"tensor {self._names[slot]!r} has shape {list(vector.shape)}; its lora_B "
                f"has {length} outputs"
            )
        return vector

    def _bias(self, config: PeftConfig, slot: PeftSlot) -> CanonicalRow:
        name, bias = self._names[slot], self._tensors[slot]
        if self._is_norm or self._module == EMBEDDING:
            raise InvalidAdapterError(f"tensor {name!r}: no {self._module} has a bias")
        is_trained = {
            "none": False,
            "all": True,
            "lora_only": config.targets(self._path),
        }[config.bias]
        if is_trained or (slot is PeftSlot.BIAS and config.saves(self._path)):
            return self._row(RowKind.BIAS, {"bias": bias})
        if self._module in _COPIED_BY_ITSELF:
            return self._row(RowKind.BIAS, {"base": bias})
        raise InvalidAdapterError(
            f"tensor {name!r} is a trained bias of the base model; {CONFIG_NAME} has "
            f"bias = {config.bias!r} and does not name the module in modules_to_save"
        )

    def _full(self, config: PeftConfig) -> CanonicalRow:
        """Return the row of whole copies: a trained copy is "weight".

        A copy that PEFT loads over the base's own parameter is "base": a tied parameter changes in
        both its places. base_copies decides what is left of a row with both.
        """
        weight = self._tensors.get(PeftSlot.WEIGHT)
        base = self._tensors.get(PeftSlot.BASE_WEIGHT)
        if weight is not None and config.saves(self._path):
            tensors = {"weight": weight} | ({} if base is None else {"base": base})
            return self._row(RowKind.FULL, tensors)
        if weight is not None and base is not None:
            raise InvalidAdapterError(
                f"tensors {self._names[PeftSlot.WEIGHT]!r} and "
                f"{self._names[PeftSlot.BASE_WEIGHT]!r} are both the weight of one module"
            )
        slot, copy = (PeftSlot.BASE_WEIGHT, base) if weight is None else (PeftSlot.WEIGHT, weight)
        if self._module in _COPIED_BY_ITSELF and copy is not None:
            return self._row(RowKind.FULL, {"base": copy})
        raise InvalidAdapterError(
            f"tensor {self._names[slot]!r} is a whole weight of a module that {CONFIG_NAME} does "
            "not name in modules_to_save"
        )

    def _tokens(self, config: PeftConfig) -> CanonicalRow:
        name, weight = self._names[PeftSlot.TOKENS], self._tensors[PeftSlot.TOKENS]
        # PEFT saves those of a tied lm_head, too, if the vocabulary was resized.
        indices = config.token_indices(self._module) or config.token_indices(EMBEDDING)
        if len(indices) != weight.shape[0]:
            raise InvalidAdapterError(
                f"tensor {name!r} has {weight.shape[0]} rows; trainable_token_indices in "
                f"{CONFIG_NAME} names {len(indices)} tokens of {self._module}"
            )
        data = np.array(indices, "<i8").tobytes()
        tensors = {"indices": RawTensor("I64", (len(indices),), data), "weight": weight}
        return self._row(RowKind.TOKENS, tensors)

    def _row(
        self, kind: RowKind, tensors: dict[str, RawTensor], scale: float = 1.0
    ) -> CanonicalRow:
        return CanonicalRow(
            self._layer, self._module, self._expert, kind, scale, tensors, self._path
        )


WEIGHTS_NAME = "adapter_model.safetensors"
TORCH_WEIGHTS_NAME = "adapter_model.bin"
WEIGHTS_NAMES = (WEIGHTS_NAME, TORCH_WEIGHTS_NAME)
"""Names of the weights file; the first that exists is read."""

# The missing feature of a tensor that no row can represent, by a fragment of its name.
_FOREIGN = {
    **dict.fromkeys(
        (".conv1d.", ".conv.conv."),
        "LoRA of a convolution over positions (train with exclude_modules: conv1d, conv.conv)",
    ),
    **dict.fromkeys(
        (".project_in.", ".project_out."),
        "LoRA of a projection between the embedding and the layers (train with exclude_modules: "
        "project_in, project_out)",
    ),
    ".embed_tokens_per_layer.": "a change of the table of the layers' own inputs (train with "
    "exclude_modules: embed_tokens_per_layer)",
    ".experts.base_layer.base_layer": "LoRA of a third parameter of experts",
    ".experts": "another layout of experts than those of docs/adapters.md",
    "token_adapter.base_layer.": "trained tokens of a module that is copied as well",
    "trainable_tokens": "more than the trained rows of a token embedding",
    "original_module": "a second copy of a module, in addition to the trained one",
    "lora_": "LoRA of a module that has none here",
    "modules_to_save": "a copy of a module that has no counterpart here",
    "vera_": "VeRA",
    "hada_": "LoHa",
    "lokr_": "LoKr",
    "oft_": "OFT",
    "ia3_": "IA3",
}

_MAX_SHOWN = 20
_UNKNOWN = BaseShapes(0, {})

_Modules = dict[tuple[int | None, str, int | None], PeftModule]


def canonical_rows(
    config: PeftConfig, tensors: Mapping[str, RawTensor], shapes: BaseShapes = _UNKNOWN
) -> tuple[CanonicalRow, ...]:
    """Return the rows of a PEFT adapter. shapes: of the base; tensors of all experts need them.

    Raises InvalidAdapterError for a tensor that is broken, incomplete, duplicated or contradicts
    the config; UnsupportedFeatureError for one that no row can represent.
    """
    rows = module_rows(config, tensors, shapes)
    _check_complete(config, rows)
    return rows


def module_rows(
    config: PeftConfig, tensors: Mapping[str, RawTensor], shapes: BaseShapes
) -> tuple[CanonicalRow, ...]:
    """Return the rows of some modules of a PEFT adapter. Raises as canonical_rows."""
    named: dict[str, TensorName] = {}
    stacked: dict[str, TensorName] = {}
    foreign = []
    for name in tensors:
        parsed = parse_name(name)
        if parsed is None:
            foreign.append(name)
            continue
        (stacked if parsed.is_stacked else named)[name] = parsed
    if foreign:
        raise foreign_error(foreign[0], foreign[1:])
    for name, tensor in tensors.items():
        _check_tensor(name, tensor)
    named, stacked = (_without_gate(found, tensors, shapes) for found in (named, stacked))
    modules: _Modules = {}
    for name, parsed in named.items():
        place = (parsed.layer, parsed.module, parsed.expert)
        if place not in modules:
            modules[place] = PeftModule(parsed.path, *place)
        modules[place].add(parsed.slot, name, tensors[name])
    if not tensors:
        raise InvalidAdapterError("the adapter has no tensors")
    unnumbered = _without_shared_factors(stacked, tensors, modules)
    rows = sort_rows(
        itertools.chain(
            (row for module in modules.values() for row in module.rows(config)),
            stacked_rows(config, unnumbered, tensors, shapes),
        )
    )
    _check_once(rows)
    return tuple(row for row in rows if row.expert is None or not _is_silent(row))


def _without_gate(
    named: dict[str, TensorName], tensors: Mapping[str, RawTensor], shapes: BaseShapes
) -> dict[str, TensorName]:
    """Read Tinker's names of experts that have no gate: w1 is up_proj, and w3 has no numbers."""
    gate, up, _ = EXPERT_MODULES
    empty = [
        name for name, place in named.items() if place.module == up and 0 in tensors[name].shape
    ]
    if not empty or gate in shapes.num_experts:
        return named
    layers = {named[name].layer for name in empty}
    return {
        name: place._replace(module=up) if place.layer in layers and place.module == gate else place
        for name, place in named.items()
        if name not in empty
    }


def _without_shared_factors(
    stacked: Mapping[str, TensorName], tensors: Mapping[str, RawTensor], modules: _Modules
) -> Mapping[str, TensorName]:
    """Add factors of all experts to the experts' modules; return the names of the other tensors.

    Megatron-Bridge saves such a factor [1, rows, columns] under a name without a number, and its
    partners under the numbers of the experts.
    """
    experts: dict[tuple[int | None, str], list[PeftModule]] = defaultdict(list)
    for (layer, module, expert), of_expert in modules.items():
        if expert is not None:
            experts[layer, module].append(of_expert)
    slots = Counter((parsed.layer, parsed.module) for parsed in stacked.values())
    rest = {}
    for name, parsed in stacked.items():
        place, tensor = (parsed.layer, parsed.module), tensors[name]
        if place not in experts or slots[place] > 1 or tensor.shape[:-2] != (1,):
            rest[name] = parsed
            continue
        one = RawTensor(tensor.dtype, tensor.shape[1:], tensor.data)
        for of_expert in experts[place]:
            of_expert.add(parsed.slot, name, one)
    return rest


def _check_once(rows: Sequence[CanonicalRow]) -> None:
    """Refuse an expert's LoRA that is there in two layouts."""
    for one, other in itertools.pairwise(rows):
        places = [(row.layer, row.module, row.expert, row.kind) for row in (one, other)]
        if one.expert is not None and places[0] == places[1]:
            raise InvalidAdapterError(
                f"{one.origin} and {other.origin} are both of expert {one.expert} of {one.module} "
                f"of layer {one.layer}"
            )


def _is_silent(row: CanonicalRow) -> bool:
    """Whether it is LoRA that was never trained, such as that of experts that no token chose."""
    return row.kind is RowKind.LORA and "bias" not in row.tensors and row.tensors["b"].is_zero()


def _check_complete(config: PeftConfig, rows: Sequence[CanonicalRow]) -> None:
    """Refuse an adapter without tensors that its config requires: PEFT cannot load it either."""
    saved = [row.origin for row in rows if row.kind is RowKind.FULL]
    for name in config.modules_to_save:
        # PEFT names both heads of every adapter of a classifier; one of them, or none, is there.
        if name not in CLASSIFIERS and not any(path.endswith(name) for path in saved):
            raise InvalidAdapterError(
                f"{CONFIG_NAME} names {name!r} in modules_to_save, but there is no tensor of it"
            )
    trained = {row.module for row in rows if row.kind is RowKind.TOKENS}
    for module in config.modules_with_tokens:
        if module not in trained:
            raise InvalidAdapterError(
                f"{CONFIG_NAME} names tokens of {module} in trainable_token_indices, but there is "
                "no tensor trainable_tokens_delta of it"
            )


def _check_tensor(name: str, tensor: RawTensor) -> None:
    if not tensor.is_float:
        raise UnsupportedFeatureError(
            f"tensor {name!r} has type {tensor.dtype}; supported: {', '.join(FLOAT_TYPES)}"
        )
    if not tensor.is_finite():
        raise InvalidAdapterError(f"tensor {name!r} holds NaN or infinity")


def foreign_error(
    name: str, others: Sequence[str] = ()
) -> InvalidAdapterError | UnsupportedFeatureError:
    """Return the error about a tensor that cannot be applied, with similar ones."""
    listed = ", ".join(repr(other) for other in others[:_MAX_SHOWN])
    more = f" and {len(others) - _MAX_SHOWN} more" if len(others) > _MAX_SHOWN else ""
    also = f"; nor can be applied {listed}{more}" if others else ""
    for fragment, needed in _FOREIGN.items():
        if fragment in name:
            return UnsupportedFeatureError(
                f"tensor {name!r} needs {needed}, which is not served{also}"
            )
    return InvalidAdapterError(
        f"tensor {name!r} is of no module that an adapter may change; an adapter is applied whole "
        f"or not at all{also}"
    )
