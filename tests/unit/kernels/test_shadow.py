"""Every op of a backend is compared with torch's, and replaced by it if it fails."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from loraplex.kernels.activations import Activation
from loraplex.kernels.ops import AttentionRules, AttentionShape, Kernels, RowLayout, Storage
from loraplex.kernels.reference import ReferenceKernels
from loraplex.kernels.routing import Routes
from loraplex.kernels.routing_rules import RoutingMode, RoutingRules
from loraplex.kernels.shadow import DeviceRuined, Fault, ShadowKernels, ops
from loraplex.kernels.states import StoredRows
from loraplex.kernels.torch_ops import TorchOps, replace_ops, with_partners

CPU = torch.device("cpu")
SHAPE = AttentionShape(4, 2, 8, 4)


class Seen:
    """Implements Observer."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.passes: list[str] = []
        self.faults: dict[str, tuple[Fault, str]] = {}

    def begin(self, op: str) -> None:
        self.begun.append(op)

    def passed(self, op: str, difference: float) -> None:
        del difference
        self.passes.append(op)

    def fell(self, op: str, fault: Fault, detail: str) -> None:
        self.faults[op] = fault, detail


def shadow(seen: Seen, synchronize: Callable[[], None] = lambda: None, **planted: Any) -> Any:
    kernels = ReferenceKernels(CPU)
    for name, op in planted.items():
        setattr(kernels, name, op)
    return ShadowKernels(kernels, CPU, seen, synchronize=synchronize)


def test_all_ops_are_compared() -> None:
    names = {name for name in vars(Kernels) if not name.startswith("_")}
    others = {"repeat", "recording", "forget_recorded", "lora_ns", "packed_layout", "size_of"}
    assert set(ops()) == names - others
    for name in names:
        assert hasattr(shadow(Seen()), name)
    assert with_partners(["linear"]) <= names
    assert with_partners(["write_kv"]) <= names


def test_a_wrong_result_is_replaced() -> None:
    seen = Seen()
    kernels = shadow(seen, activate=lambda x, _: x + 1)
    x = torch.tensor([[-1.0, 2.0]])
    for _ in range(2):
        assert kernels.activate(x, Activation.RELU).tolist() == [[0.0, 2.0]]
    assert seen.faults["activate"][0] is Fault.WRONG
    assert seen.begun == ["activate"], "a fallen op is not tried again"


def test_what_a_wrong_op_wrote_is_replaced() -> None:
    seen = Seen()

    def wrong(x: torch.Tensor, factor: float, soft_cap: float | None = None) -> None:
        x.zero_()

    kernels, x = shadow(seen, scale=wrong), torch.tensor([[1.0, 2.0]])
    kernels.scale(x, 2.0)
    assert x.tolist() == [[2.0, 4.0]]
    assert set(seen.faults) == {"scale"}


@pytest.mark.parametrize(
    "result",
    [
        torch.zeros(2, 3),
        torch.full((2, 2), torch.nan),
        torch.zeros(2, 2, dtype=torch.float16),
        torch.full((2, 2), torch.inf),
    ],
    ids=["shape", "nan", "dtype", "infinite"],
)
def test_any_other_result_is_wrong(result: torch.Tensor) -> None:
    seen = Seen()
    kernels = shadow(seen, sigmoid_gate=lambda *_: result)
    right = kernels.sigmoid_gate(torch.ones(2, 2), torch.zeros(2, 2))
    assert right.tolist() == [[0.5, 0.5], [0.5, 0.5]]
    assert set(seen.faults) == {"sigmoid_gate"}


def test_roundings_are_no_fault() -> None:
    seen = Seen()
    kernels = shadow(seen, multiply=lambda x, factor: x * factor * (1 + 2**-8))
    x = torch.randn(4, 64).bfloat16()
    kernels.multiply(x, x)
    assert not seen.faults


def test_an_op_that_raises_takes_its_partners_with_it() -> None:
    seen = Seen()

    def raises(*_: Any) -> None:
        raise RuntimeError("no kernel image\nis available")

    kernels = shadow(seen, linear=raises)
    packed = kernels.pack_linear(torch.eye(3), None)
    assert torch.equal(kernels.linear(torch.ones(2, 3), packed), torch.ones(2, 3))
    assert seen.faults == {"linear": (Fault.RAISES, "RuntimeError: no kernel image")}
    later = kernels.pack_linear(2 * torch.eye(3), None)
    assert torch.equal(kernels.linear(torch.ones(2, 3), later), 2 * torch.ones(2, 3))
    assert torch.equal(kernels.linear(torch.ones(2, 3), packed), torch.ones(2, 3))
    assert "grouped_linear" in kernels.fallen


def test_an_error_that_ruins_the_device_ends_the_run() -> None:
    seen = Seen()

    def synchronize() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    kernels = shadow(seen, synchronize=synchronize)
    with pytest.raises(DeviceRuined, match="activate"):
        kernels.activate(torch.ones(1, 1), Activation.RELU)
    assert seen.faults["activate"][0] is Fault.CRASHES


def attended(kernels: Any) -> torch.Tensor:
    """Attention of one row with five positions, of which the last two are new."""
    torch.manual_seed(0)
    storage = kernels.allocate_kv(3, SHAPE, torch.float32)
    key, value = torch.randn(2, 5, 2, 8)
    kernels.write_kv(storage, key, value, torch.tensor([4, 5, 6, 7, 8]))
    rows = RowLayout([0, 2], [5], torch.tensor([[1, 2]]))
    plan = kernels.plan_attention(rows, SHAPE, AttentionRules(scale=0.5))
    result: torch.Tensor = kernels.paged_attention(torch.randn(2, 4, 8), storage, plan)
    return result


def test_keys_and_values_are_kept_in_both_forms() -> None:
    seen = Seen()
    assert torch.equal(attended(shadow(seen)), attended(ReferenceKernels(CPU)))
    assert seen.passes == ["write_kv", "paged_attention"]

    seen = Seen()

    def wrong(query: torch.Tensor, *_: Any) -> torch.Tensor:
        return query

    kernels = shadow(seen, paged_attention=wrong)
    assert torch.equal(attended(kernels), attended(ReferenceKernels(CPU)))
    assert set(seen.faults) == {"paged_attention"}
    assert torch.equal(attended(kernels), attended(ReferenceKernels(CPU)))


def convolved(kernels: Any, storage: Storage) -> list[torch.Tensor]:
    """Return what two steps of one row give, of which the second reads what the first kept."""
    torch.manual_seed(0)
    x, weight, rows = torch.randn(5, 3), torch.randn(3, 2), []
    for start, end in ((0, 3), (3, 5)):
        positions = torch.arange(start, end, dtype=torch.int32)
        stored = StoredRows(
            torch.tensor([0, end - start], dtype=torch.int32),
            positions,
            positions,
            torch.zeros(1, dtype=torch.int32),
            torch.arange(2, dtype=torch.int32),
        )
        part = x[start:end]
        rows.append(kernels.causal_conv(part, weight, None, None, stored, storage))
    return rows


def test_what_an_op_keeps_may_have_a_form_of_its_own() -> None:
    def upside_down(op: Callable[..., Any]) -> Callable[..., Any]:
        def planted(x: Any, weight: Any, bias: Any, act: Any, rows: Any, storage: Any) -> Any:
            (stored,) = storage.tensors
            kept = Storage((stored.flip(-1),))
            result = op(x, weight, bias, act, rows, kept)
            stored.copy_(kept.tensors[0].flip(-1))
            return result

        return planted

    own = ReferenceKernels(CPU)
    expected = convolved(own, Storage((torch.zeros(2, 4, 3),)))
    seen = Seen()
    kernels = shadow(seen, causal_conv=upside_down(own.causal_conv))
    found = convolved(kernels, Storage((torch.zeros(2, 4, 3),)))
    assert not seen.faults
    assert all(map(torch.equal, found, expected))

    # One that loses what it kept differs in the step that reads it; then torch has it all.
    seen = Seen()
    kernels = shadow(
        seen,
        causal_conv=lambda *given: own.causal_conv(*given[:5], Storage((torch.zeros(2, 4, 3),))),
    )
    found = convolved(kernels, Storage((torch.zeros(2, 4, 3),)))
    assert seen.faults["causal_conv"][0] is Fault.WRONG
    assert all(map(torch.equal, found, expected))


def test_pairs_of_experts_must_be_sorted() -> None:
    seen = Seen()
    rules = RoutingRules(num_experts=4, num_chosen=2, mode=RoutingMode.SOFTMAX)

    def unsorted(*arguments: Any) -> Routes:
        routes = ReferenceKernels(CPU).route(*arguments)
        return Routes(routes.experts, routes.weights, routes.pairs.flip(0), routes.starts)

    kernels = shadow(seen, route=unsorted)
    logits = torch.randn(6, 4)
    assert torch.equal(
        kernels.route(logits, rules).pairs, ReferenceKernels(CPU).route(logits, rules).pairs
    )
    assert set(seen.faults) == {"route"}


@pytest.mark.parametrize("is_right", [True, False])
def test_a_recorded_step_is_compared_with_its_ops(is_right: bool) -> None:
    seen = Seen()

    def repeat(_key: Any, _parameters: Any, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        return compute() if is_right else torch.zeros(1)

    kernels = shadow(seen, repeat=repeat)
    kernels.compares_steps = True
    assert kernels.repeat("step", (), lambda: torch.ones(1)).tolist() == [1.0]
    assert ("repeat" in seen.faults) is not is_right


def test_torch_s_ops_take_an_accelerator_s_padding() -> None:
    kernels = ReferenceKernels(CPU)
    replace_ops(kernels, TorchOps(CPU), ["write_kv"])
    storage = kernels.allocate_kv(2, SHAPE, torch.float32)
    ones = torch.ones(2, 2, 8)
    kernels.write_kv(storage, ones, ones, torch.tensor([0, -1]))
    assert float(storage.tensors[0].sum()) == ones[0].sum()
