"""Runs a backend's ops next to torch's, on the same inputs, and compares what both give.

A step of any model checks the ops that it calls, in the shapes that it has. An op that raises or is
wrong is torch's from then on, so one run finds all such ops. What ends the process, or never ends,
is for another process to find: an `Observer` gets each op before it begins.
"""

import contextlib
import dataclasses
import enum
import functools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Final, NamedTuple, Protocol

import torch

from loraplex.kernels.ops import Kernels, LinearParts, Parameter, Storage
from loraplex.kernels.quantization import QuantizedWeight, SuperBlockWeight
from loraplex.kernels.routing import Routes, sort_routes
from loraplex.kernels.sampling import TopLogprobs
from loraplex.kernels.torch_ops import RECORDED_STEPS, TorchOps, with_partners

TOLERANCE: Final = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 4e-2}
"""Largest difference, relative to the largest number of the result: some roundings of the type."""
QUANTIZED_TOLERANCE: Final = 0.1
"""The same of products that round their inputs, which torch's do not."""

_OPAQUE: Final = frozenset(
    (
        *("pack_linear", "pack_blocks", "join_linear", "linear_parts"),
        *("plan_attention", "plan_latent_attention", "allocate_kv"),
    )
)
"""Ops whose results only their own backend can read."""
_KEEPING: Final = frozenset(("causal_conv", "delta_rule", "ssd"))
"""Ops that keep numbers of earlier positions in a form of their own. They are compared by what
later calls make of them."""
_READING: Final = frozenset(("take_rows",))
"""Ops whose inputs are large and never written."""
_ROUNDING: Final = frozenset(("linear", "linear_apart", "grouped_linear"))
_ANY_TYPE: Final = frozenset(("linear_apart",))
"""Ops whose result has the type that they computed in."""
_NEARLY_EXACT: Final = frozenset(("draw_tokens", "top_logprobs", "route"))
"""Ops that choose by numbers which may be rounded otherwise: few of their choices may differ."""
_MOST_OTHERS: Final = 16
"""One choice of so many may differ, and one of any number."""


class Fault(enum.StrEnum):
    """How an op fails."""

    WRONG = "wrong"
    RAISES = "raises"
    HANGS = "hangs"
    CRASHES = "crashes"


class Observer(Protocol):
    """Receives what happens, as it happens."""

    def begin(self, op: str) -> None: ...

    def passed(self, op: str, difference: float) -> None:
        """difference: relative, see TOLERANCE."""
        ...

    def fell(self, op: str, fault: Fault, detail: str) -> None: ...


class DeviceRuined(Exception):
    """An op left the device in a state in which nothing can run any more in this process."""


class Twin(NamedTuple):
    """An opaque value in both forms."""

    own: Any
    """None: torch has replaced the op."""
    torch: Any


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class TwinStorage(Storage):
    """Storage of the backend, with the same content in torch's form."""

    torch: Storage


class ShadowKernels:
    """Implements `Kernels`, one rank's: what a call gives is the backend's result, or torch's."""

    def __init__(
        self,
        kernels: Kernels,
        device: torch.device,
        observer: Observer,
        *,
        fallen: Iterable[str] = (),
        is_quantized: bool = False,
        dtype: torch.dtype = torch.float32,
        synchronize: Callable[[], None] = lambda: None,
    ) -> None:
        """fallen: ops that torch computes. is_quantized: weights are. synchronize: the device.

        dtype: the model's, in which torch has weights that are quantised already.
        """
        self.packed_layout = kernels.packed_layout
        self.lora_ns = None
        self.fallen = with_partners(fallen)
        self.compares_steps = False
        """Whether recorded steps are compared, in place of the ops in them."""
        self._own = kernels
        self._torch = TorchOps(device)
        self._observer = observer
        self._is_quantized = is_quantized
        self._dtype = dtype
        self._synchronize = synchronize
        self._is_recording = False
        self._kept: dict[Storage, TwinStorage] = {}
        """Storages of _KEEPING, which the runner allocates."""
        for name in ops():
            setattr(self, name, functools.partial(self._call, name))

    def repeat(
        self,
        key: Hashable,
        parameters: Sequence[Parameter],
        compute: Callable[[], torch.Tensor],
    ) -> torch.Tensor:
        if not self.compares_steps or RECORDED_STEPS in self.fallen:
            return compute()
        own = [_own_form(parameter) for parameter in parameters]
        expected = None if self._is_recording else compute().clone()

        def repeated() -> torch.Tensor:
            return self._own.repeat(key, own, compute).clone()

        found: torch.Tensor | None = self._tried(RECORDED_STEPS, repeated)
        if found is None:
            return compute() if expected is None else expected
        if expected is not None and not self._is_near(RECORDED_STEPS, found, expected):
            return expected
        return found

    def size_of(self, op: str, arguments: Sequence[Any]) -> str | None:
        return self._own.size_of(op, [_own_form(value) for value in arguments])

    @contextlib.contextmanager
    def recording(self) -> Any:
        """Record steps; nothing is compared, since they have no rows."""
        with self._own.recording():
            self._is_recording = True
            try:
                yield
            finally:
                self._is_recording = False

    def forget_recorded(self) -> None:
        self._own.forget_recorded()

    def _call(self, name: str, *arguments: Any, **options: Any) -> Any:
        if name in _KEEPING:
            arguments = tuple(map(self._kept_twice, arguments))
        if name in self.fallen:
            given = [self._torch_form(value) for value in arguments]
            result = getattr(self._torch, name)(*given, **options)
            return Twin(None, result) if name in _OPAQUE else result
        own = functools.partial(
            getattr(self._own, name),
            *map(_own_form, arguments),
            **options,
        )
        if self.compares_steps and name not in _OPAQUE:
            return own()
        copies = [self._torch_form(value) for value in arguments]
        if name not in _READING:
            copies = [copied(given, value) for given, value in zip(arguments, copies, strict=True)]
        expected = getattr(self._torch, name)(*copies, **options)
        found = self._tried(name, lambda: (own(),))
        if found is not None:
            (result,) = found
            if name in _OPAQUE:
                return _twin(result, expected)
            pairs = written(name, arguments, copies)
            both = (compared(result, pairs[0]), compared(expected, pairs[1]))
            if self._is_near(name, *both):
                return result
        for given, copy in zip(*written(name, arguments, copies), strict=True):
            given.copy_(copy)
        return _twin(None, expected) if name in _OPAQUE else expected

    def _kept_twice(self, value: Any) -> Any:
        """Return the twin of a storage. Both begin with the same content."""
        if not isinstance(value, Storage):
            return value
        if value not in self._kept:
            copies = Storage(tuple(tensor.clone() for tensor in value.tensors))
            self._kept[value] = TwinStorage(value.tensors, copies)
        return self._kept[value]

    def _torch_form(self, value: Any) -> Any:
        match value:
            case Twin() | TwinStorage():
                return value.torch
            case QuantizedWeight() | SuperBlockWeight():
                return value.dequantized().to(self._dtype)
        return value

    def _tried(self, name: str, compute: Callable[[], Any]) -> Any:
        """Return what the backend computes; None: it fell. Raises DeviceRuined."""
        self._observer.begin(name)
        try:
            result = compute()
            self._synchronize()
        except Exception as error:
            detail = f"{type(error).__name__}: {error}".splitlines()[0]
            try:
                self._synchronize()
            except Exception as ruined:
                self._observer.fell(name, Fault.CRASHES, detail)
                raise DeviceRuined(name) from ruined
            self._fall(name, Fault.RAISES, detail)
            return None
        return result

    def _is_near(self, name: str, found: Any, expected: Any) -> bool:
        detail, worst = unlike(name, found, expected, is_quantized=self._is_quantized)
        if detail:
            self._fall(name, Fault.WRONG, detail)
            return False
        self._observer.passed(name, worst)
        return True

    def _fall(self, name: str, fault: Fault, detail: str) -> None:
        self.fallen |= with_partners((name,))
        self._observer.fell(name, fault, detail)


def ops(backend: type = ShadowKernels) -> list[str]:
    """Return the names of the ops that a backend does not define itself, such as ShadowKernels."""
    own = vars(backend)
    return [
        name
        for name, member in vars(Kernels).items()
        if not name.startswith("_") and name not in own and callable(member)
    ]


def unlike(name: str, found: Any, expected: Any, *, is_quantized: bool) -> tuple[str, float]:
    """Return how two results of an op differ, and the largest difference; "": they do not.

    is_quantized: weights are.
    """
    worst = 0.0
    for own, right in zip(_flat(found), _flat(expected), strict=True):
        is_alike = own.dtype == right.dtype or name in _ANY_TYPE
        if own.shape != right.shape or not is_alike:
            return f"{own.dtype} {tuple(own.shape)}, not {right.dtype} {tuple(right.shape)}", worst
        difference = _difference(own, right)
        allowed = max(_allowed(name, each, is_quantized=is_quantized) for each in (own, right))
        if not difference <= allowed:
            return _described(own, difference), worst
        if own.dtype.is_floating_point:
            worst = max(worst, difference)
    return "", worst


def _allowed(name: str, tensor: torch.Tensor, *, is_quantized: bool) -> float:
    if not tensor.dtype.is_floating_point:
        is_near = name in _NEARLY_EXACT and tensor.dtype != torch.bool
        return max(1, tensor.numel() // _MOST_OTHERS) if is_near else 0
    if is_quantized and name in _ROUNDING:
        return QUANTIZED_TOLERANCE
    return TOLERANCE.get(tensor.dtype, TOLERANCE[torch.float32])


def _own_form(value: Any) -> Any:
    """Return an argument as the backend reads it; torch's form if it has none."""
    if isinstance(value, Twin):
        return value.torch if value.own is None else value.own
    return value


def _twin(own: Any, right: Any) -> Any:
    if isinstance(right, Storage):
        return TwinStorage((right if own is None else own).tensors, right)
    return Twin(own, right)


def copied(given: Any, value: Any) -> Any:
    """Return an argument that torch may write. value: its form for torch, where it has two."""
    match value:
        case torch.Tensor():
            return value.clone()
        case Storage() if value is given:
            return Storage(tuple(tensor.clone() for tensor in value.tensors))
    return value


def written(name: str, arguments: Sequence[Any], copies: Sequence[Any]) -> tuple[Any, Any]:
    """Return the tensors among the arguments that an op may have written, and their copies."""
    given: list[torch.Tensor] = []
    others: list[torch.Tensor] = []
    if name in _READING:
        return given, others
    for value, copy in zip(arguments, copies, strict=True):
        if isinstance(value, torch.Tensor):
            given.append(value)
            others.append(copy)
        elif isinstance(value, Storage) and not isinstance(value, TwinStorage):
            given.extend(value.tensors)
            others.extend(copy.tensors)
    return given, others


def compared(result: Any, changed: Sequence[torch.Tensor]) -> Any:
    """Return the tensors of a result that are determined, and those that the op wrote."""
    match result:
        case Routes():
            # Of which pairs an expert has, the choice decides all.
            sorted_again = sort_routes(result.experts, result.weights, result.num_experts)
            is_sorted = torch.equal(result.pairs, sorted_again.pairs) and torch.equal(
                result.starts, sorted_again.starts
            )
            return (result.experts, result.weights, torch.tensor(is_sorted), *changed)
        case TopLogprobs():
            own = (result.logprobs, result.ranks, result.top_ids, result.top_logprobs)
            return (*own, *changed)
        case LinearParts():
            return changed
    return (result, *changed)


def _flat(value: Any) -> list[torch.Tensor]:
    match value:
        case torch.Tensor():
            return [value]
        case tuple() | list():
            return [tensor for each in value for tensor in _flat(each)]
    return []


def _difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference, relative to the largest number; of integers how many differ.

    NaN if only one of them is NaN somewhere.
    """
    if not found.numel():
        return 0.0
    if not found.dtype.is_floating_point:
        return float((found != expected).sum())
    own, right = found.double(), expected.double()
    is_same = (own == right) | (own.isnan() & right.isnan())
    difference = torch.where(is_same, 0.0, (own - right).abs()).max()
    scale = torch.where(right.isfinite(), right.abs(), 0.0).max()
    return float(difference / scale.clamp(min=1e-6))


def _described(tensor: torch.Tensor, difference: float) -> str:
    if tensor.dtype.is_floating_point:
        return f"differs by {difference:.2g} of the largest number, in {tuple(tensor.shape)}"
    return f"{difference:.0f} of {tensor.numel()} numbers differ"
