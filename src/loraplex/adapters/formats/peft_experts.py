"""Conversion of PEFT tensors with the LoRA of all experts of a layer to rows of single experts.

PEFT's target_parameters, vLLM, SGLang and Unsloth order such tensors differently: files of
different tools and versions have the same names and shapes for different orders of the same
numbers. Where names, shapes and adapter_config.json leave two readings, an adapter is refused
unless the operator names one: the wrong one would give fluent output.
"""

import dataclasses
import enum
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import NamedTuple

from loraplex.adapters.canonical import CanonicalRow, RowKind
from loraplex.adapters.formats.peft_config import CONFIG_NAME, PeftConfig
from loraplex.adapters.formats.peft_names import INNER_STACK, OUTER_STACK, PeftSlot, TensorName
from loraplex.adapters.formats.single_experts import Bits, single_experts
from loraplex.adapters.shapes import BaseShapes
from loraplex.adapters.tensor_file import RawTensor
from loraplex.core.adapter import EXPERT_LORA_CHOICES, ExpertLoraLayout
from loraplex.core.errors import AdapterMismatchError, InvalidAdapterError, UnsupportedFeatureError

_RELEASE = re.compile(r"(\d+)\.(\d+)\.(\d+)(?:\.post\d+)?")
_FIRST_SWAPPING = (0, 19, 0)
"""Release of PEFT that swapped the sizes of all parameters of experts; later ones leave out the
transposed ones. Earlier ones swapped none."""


class StackLayout(enum.Enum):
    """Order of a pair of tensors. The value describes it."""

    FLAT = "A [experts * rank, in], B [out, rank * experts]"
    """That of PEFT. In Unsloth's B the experts may vary slower than the rank."""
    EXPERTS_LAST = "A [experts, rank, in], B [out, rank, experts]"
    """That of vLLM."""
    EXPERTS_FIRST = "A [experts or 1, rank, in], B [experts or 1, out, rank]"
    """That of SGLang: 1 is one factor for all experts. A of gate and up may be two, one below the
    other."""

    @classmethod
    def of(cls, num_dimensions: int, is_of_peft: bool) -> "StackLayout | None":
        """Return the layout of tensors. is_of_peft: their names are those of PEFT's wrappers."""
        if num_dimensions == 3:
            return cls.EXPERTS_LAST if is_of_peft else cls.EXPERTS_FIRST
        return cls.FLAT if num_dimensions == 2 and is_of_peft else None

    def factors(
        self,
        a: RawTensor,
        b: RawTensor,
        num_experts: int,
        *,
        num_parts: int,
        is_rank_major: bool,
    ) -> tuple[Bits, Bits] | None:
        """Return A [experts or 1, rank, in] and B [experts or 1, out, rank]; None for no such pair.

        num_parts: projections that B is of. is_rank_major: in a flat B the experts vary faster than
        the rank.
        """
        a_bits, b_bits = a.bits(), b.bits()
        match self:
            case StackLayout.EXPERTS_FIRST:
                is_pair = a.shape[1] in (b.shape[2], num_parts * b.shape[2])
                is_pair &= {a.shape[0], b.shape[0]} <= {1, num_experts}
                return (a_bits, b_bits) if is_pair else None
            case StackLayout.EXPERTS_LAST:
                is_pair = a.shape[0] == num_experts and b.shape[1:] == (a.shape[1], num_experts)
                return (a_bits, b_bits.transpose(2, 0, 1)) if is_pair else None
        rank, rest = divmod(a.shape[0], num_experts)
        if rest or b.shape[1] != a.shape[0]:
            return None
        a_bits = a_bits.reshape(num_experts, rank, -1)
        if is_rank_major:
            return a_bits, b_bits.reshape(-1, rank, num_experts).transpose(2, 0, 1)
        return a_bits, b_bits.reshape(-1, num_experts, rank).transpose(1, 0, 2)


def is_rank_major(config: PeftConfig, shapes: BaseShapes, what: str) -> bool:
    """Whether the experts vary faster than the rank in the columns of a flat B.

    what: names of the tensors, for messages. Raises InvalidAdapterError if nothing decides.
    """
    if config.b_layout is None and not config.is_of_unsloth:
        return True
    layout = config.b_layout or _word_of(shapes, EXPERT_LORA_CHOICES[0])
    if layout is None:
        raise InvalidAdapterError(
            f"the columns of lora_B of {what} may be rank_major or grouped_by_expert: {CONFIG_NAME}"
            " has unsloth_fixed without lora_B_layout. Add lora_B_layout to it, or set "
            "expert_lora_layout to the order that the version of Unsloth wrote"
        )
    return layout == ExpertLoraLayout.RANK_MAJOR


def was_swapped(config: PeftConfig, shapes: BaseShapes, others: Set[bool], what: str) -> bool:
    """Whether A and B of a square weight are those of the transposed weight.

    others: results for the adapter's other tensors, from their shapes. Raises
    InvalidAdapterError if nothing decides.
    """
    if len(others) == 1:
        return next(iter(others))
    release = _RELEASE.fullmatch(config.peft_version or "")
    if release:
        version = tuple(map(int, release.groups()))
        if shapes.has_transposed_experts:
            return version == _FIRST_SWAPPING
        return version <= _FIRST_SWAPPING
    word = _word_of(shapes, EXPERT_LORA_CHOICES[1])
    if word is None:
        raise InvalidAdapterError(
            f"{what} fit the weights and the transposed weights, of which PEFT 0.17 to 0.19.0 "
            f"saves them, and {CONFIG_NAME} has no peft_version of a release. Add it, or set "
            "expert_lora_layout to unswapped or swapped"
        )
    return word is ExpertLoraLayout.SWAPPED


def _word_of(shapes: BaseShapes, words: tuple[ExpertLoraLayout, ...]) -> ExpertLoraLayout | None:
    return next((word for word in shapes.expert_lora_layout if word in words), None)


_PARTS = {
    "gate_up_proj": ("experts.gate_proj", "experts.up_proj"),
    "gate_proj": ("experts.gate_proj",),
    "up_proj": ("experts.up_proj",),
    "down_proj": ("experts.down_proj",),
}
"""Modules of a base model that one tensor may be of."""
_OF_GRANITE = ("input_linear", "output_linear")
"""Modules whose weight is the parameter of all experts."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Stack:
    """LoRA of all experts of a layer."""

    path: str
    layer: int
    module: str
    tensors: dict[PeftSlot, RawTensor] = dataclasses.field(default_factory=dict)
    names: dict[PeftSlot, str] = dataclasses.field(default_factory=dict)

    @property
    def is_wrapped(self) -> bool:
        """Whether the name is that of PEFT's wrapper, which names no parameter."""
        return self.module in (OUTER_STACK, INNER_STACK)

    @property
    def is_of_granite(self) -> bool:
        return self.path.endswith(_OF_GRANITE)

    def parameter(self, projection: str) -> str:
        """Return the path by which adapter_config.json names what the tensors are of."""
        if self.is_wrapped:
            return f"{self.path.removesuffix('.base_layer')}.{projection}"
        return f"{self.path}.weight" if self.is_of_granite else self.path

    @property
    def what(self) -> str:
        a, b = self.tensors[PeftSlot.A], self.tensors[PeftSlot.B]
        return (
            f"tensors {self.names[PeftSlot.A]!r} {list(a.shape)} and "
            f"{self.names[PeftSlot.B]!r} {list(b.shape)}"
        )


class _Factors(NamedTuple):
    stack: _Stack
    projection: str
    a: Bits
    """[experts or 1, rank, in]; of the transposed weight if they are swapped."""
    b: Bits
    """[experts or 1, out, rank]"""
    is_swapped: bool | None
    """None: the shapes fit both ways."""


def stacked_rows(
    config: PeftConfig,
    named: Mapping[str, TensorName],
    tensors: Mapping[str, RawTensor],
    shapes: BaseShapes,
) -> list[CanonicalRow]:
    """Return the rows of stacked tensors. An expert whose B is zero has none.

    Raises InvalidAdapterError, UnsupportedFeatureError, or AdapterMismatchError if they are not of
    the base's experts.
    """
    stacks = _collect(named, tensors)
    inner = {stack.layer for stack in stacks if stack.module == INNER_STACK}
    outer = {stack.layer for stack in stacks if stack.module == OUTER_STACK}
    for stack in stacks:
        _check_stack(stack, outer, config, shapes)
    factors = [
        _factors(stack, _projection(stack, stack.layer in inner, config, shapes), config, shapes)
        for stack in stacks
    ]
    verdicts = {one.is_swapped for one in factors if one.is_swapped is not None}
    rows: list[CanonicalRow] = []
    for one in factors:
        is_swapped = one.is_swapped
        if is_swapped is None:
            is_swapped = was_swapped(config, shapes, verdicts, one.stack.what)
        rows += _rows(one, is_swapped, config, shapes)
    return rows


def _collect(named: Mapping[str, TensorName], tensors: Mapping[str, RawTensor]) -> Sequence[_Stack]:
    stacks: dict[tuple[int, str], _Stack] = {}
    for name, parsed in named.items():
        if parsed.slot not in (PeftSlot.A, PeftSlot.B):
            raise UnsupportedFeatureError(
                f"tensor {name!r}: only lora_A and lora_B of experts are served"
            )
        assert parsed.layer is not None
        place = (parsed.layer, parsed.module)
        stack = stacks.setdefault(place, _Stack(parsed.path, *place))
        if parsed.slot in stack.tensors:
            raise InvalidAdapterError(
                f"tensors {stack.names[parsed.slot]!r} and {name!r} are both {parsed.slot.value} "
                "of one module"
            )
        stack.tensors[parsed.slot], stack.names[parsed.slot] = tensors[name], name
    return list(stacks.values())


def _check_stack(stack: _Stack, outer: set[int], config: PeftConfig, shapes: BaseShapes) -> None:
    if len(stack.tensors) < 2:
        ((slot, name),) = stack.names.items()
        missing = "B" if slot is PeftSlot.A else "A"
        raise InvalidAdapterError(f"tensor {name!r} has no lora_{missing} to go with it")
    if any(0 in tensor.shape for tensor in stack.tensors.values()):
        raise InvalidAdapterError(f"{stack.what} are empty")
    if config.use_dora or config.lora_bias:
        raise UnsupportedFeatureError(
            f"{stack.what}: {CONFIG_NAME} sets use_dora or lora_bias, but only LoRA of experts is "
            "served"
        )
    if stack.module == INNER_STACK and stack.layer not in outer:
        raise InvalidAdapterError(
            f"{stack.what} are of the first of two parameters; there are no tensors of the second, "
            "experts.lora_A and experts.lora_B"
        )
    own = shapes.layer(stack.layer).num_experts
    both = _parameters(stack.layer, shapes)
    named = (*both, *(() if stack.is_wrapped else (stack.module.rpartition(".")[2],)))
    if any(part not in own for one in named for part in _PARTS[one]):
        missing = "it, or its experts have no gate" if own else "none"
        raise AdapterMismatchError(f"{stack.what} are of experts; the base model has {missing}")


def _parameters(layer: int, shapes: BaseShapes) -> tuple[str, str]:
    """Return the parameters of all experts: what they read from, and what they write by."""
    has_gate = _PARTS["gate_proj"][0] in shapes.layer(layer).num_experts
    return "gate_up_proj" if has_gate else "up_proj", "down_proj"


def _projection(stack: _Stack, has_inner: bool, config: PeftConfig, shapes: BaseShapes) -> str:
    """Return which of _PARTS the tensors are of."""
    if not stack.is_wrapped:
        return stack.module.rpartition(".")[2]
    both = _parameters(stack.layer, shapes)
    if has_inner:
        return both[0] if stack.module == INNER_STACK else both[1]
    targeted = [one for one in both if config.targets_parameter(stack.parameter(one))]
    if len(targeted) == 2:
        raise InvalidAdapterError(
            f"{CONFIG_NAME} names {' and '.join(both)} in target_parameters, but in "
            f"addition to {stack.what} there are no tensors of the other one"
        )
    if targeted:
        return targeted[0]
    a, b = stack.tensors[PeftSlot.A], stack.tensors[PeftSlot.B]
    sizes = {a.shape[-1], b.shape[0]}
    fitting = [one for one in both if set(_sizes(one, stack.layer, shapes)) == sizes]
    if len(fitting) != 1:
        raise InvalidAdapterError(
            f"{stack.what} may be of {' or '.join(both)} of the experts: name the one that was "
            f"trained in target_parameters of {CONFIG_NAME}"
        )
    return fitting[0]


def _sizes(projection: str, layer: int, shapes: BaseShapes) -> tuple[int, int]:
    """Return (in_features, out_features) in a layer of the base model."""
    modules = shapes.layer(layer).modules
    sizes = [modules[part] for part in _PARTS[projection]]
    return sizes[0][0], sum(out for _, out in sizes)


def _factors(stack: _Stack, projection: str, config: PeftConfig, shapes: BaseShapes) -> _Factors:
    a, b = stack.tensors[PeftSlot.A], stack.tensors[PeftSlot.B]
    is_of_peft = stack.is_wrapped or stack.is_of_granite
    layout = StackLayout.of(len(a.shape), is_of_peft) if len(a.shape) == len(b.shape) else None
    if layout is None:
        raise InvalidAdapterError(
            f"{stack.what} have no known layout of experts; known: "
            f"{'; '.join(known.value for known in StackLayout)}"
        )
    num_experts = shapes.layer(stack.layer).num_experts[_PARTS[projection][0]]
    has_one_order = layout is not StackLayout.FLAT or num_experts in (1, a.shape[0])
    is_fast = has_one_order or is_rank_major(config, shapes, stack.what)
    num_parts = len(_PARTS[projection])
    factors = layout.factors(a, b, num_experts, num_parts=num_parts, is_rank_major=is_fast)
    needed = _sizes(projection, stack.layer, shapes)
    sizes = None if factors is None else (factors[0].shape[2], factors[1].shape[1])
    can_be_swapped = layout is not StackLayout.EXPERTS_FIRST and sizes == needed[::-1]
    if factors is None or (sizes != needed and not can_be_swapped):
        raise AdapterMismatchError(
            f"{stack.what} do not fit {projection} of {num_experts} experts, which have "
            f"{needed[0]} inputs and {needed[1]} outputs in the base model, as {layout.value}"
        )
    is_square = can_be_swapped and sizes == needed
    return _Factors(stack, projection, *factors, None if is_square else can_be_swapped)


def _rows(
    factors: _Factors, is_swapped: bool, config: PeftConfig, shapes: BaseShapes
) -> Iterator[CanonicalRow]:
    stack, projection, a, b, _ = factors
    if is_swapped:
        a, b = b.transpose(0, 2, 1), a.transpose(0, 2, 1)
    path = stack.parameter(projection)
    settings = config.settings_of(path)
    if not settings.is_targeted and not _targets_modules(stack, projection, config):
        raise InvalidAdapterError(
            f"{stack.what} are of a module that {CONFIG_NAME} does not target"
        )
    rank = b.shape[2]
    if settings.rank != rank:
        raise InvalidAdapterError(
            f"{stack.what} have rank {rank}; {CONFIG_NAME} has {settings.rank} for {path}"
        )
    parts = _PARTS[projection]
    for index, part in enumerate(parts):
        # Two As one below the other belong to gate and up; one A is of both.
        of_part = a[:, index * rank : (index + 1) * rank] if a.shape[1] > rank else a
        outputs = _outputs(index, len(parts), b.shape[1], shapes)
        of_experts = single_experts(
            of_part, b[:, outputs], shapes.layer(stack.layer).num_experts[part]
        )
        for expert, of_a, of_b in of_experts:
            tensors = {
                "a": _tensor(stack.tensors[PeftSlot.B if is_swapped else PeftSlot.A], of_a),
                "b": _tensor(stack.tensors[PeftSlot.A if is_swapped else PeftSlot.B], of_b),
            }
            place = (stack.layer, part, expert, RowKind.LORA)
            yield CanonicalRow(*place, settings.scale, tensors, path)


def _targets_modules(stack: _Stack, projection: str, config: PeftConfig) -> bool:
    """Whether the config targets the wrapped module, or the modules of single experts."""
    path = stack.parameter(projection)
    root = stack.path.removesuffix(".base_layer") if stack.is_wrapped else path.rpartition(".")[0]
    names = [part.rpartition(".")[2] for part in _PARTS[projection]]
    return any(map(config.targets, (stack.path, *(f"{root}.0.{name}" for name in names))))


def _outputs(index: int, num_parts: int, num_outputs: int, shapes: BaseShapes) -> slice:
    """Return which outputs are those of a part."""
    if num_parts > 1 and shapes.has_interleaved_experts:
        return slice(index, None, num_parts)
    size = num_outputs // num_parts
    return slice(index * size, (index + 1) * size)


def _tensor(stored: RawTensor, bits: Bits) -> RawTensor:
    """Return elements of a tensor in its type."""
    return RawTensor(stored.dtype, bits.shape, bits.data.cast("B"))
