"""Launches of layers with experts."""

import functools

import torch

from loraplex.core.weight_precision import WeightPrecision
from loraplex.kernels.cuda import experts
from loraplex.kernels.cuda.grouped_linear import GroupedLinear
from loraplex.kernels.cuda.linear_packing import CudaWeight, empty_weight, pack_weight
from loraplex.kernels.cuda.lora import CudaLora
from loraplex.kernels.lora import LoraBatch, LoraCells, LoraPlace, LoraSegments
from loraplex.kernels.routing import Routes
from loraplex.kernels.routing_rules import RoutingMode, RoutingRules
from support.kernel_cases import Cases
from support.kernel_cases.linear import STORED
from support.kernel_cases.llamas import DTYPES, GPU, empty
from support.kernel_cases.lora import device_batch, host_batch

HIDDEN, INNER = 2048, 768
MODULES = {
    "experts.gate_proj": (HIDDEN, INNER),
    "experts.up_proj": (HIDDEN, INNER),
    "experts.down_proj": (INNER, HIDDEN),
}
_NUM_LAYERS = 4
RULES = RoutingRules(num_experts=128, num_chosen=8, mode=RoutingMode.SOFTMAX, normalizes=True)
"""Those of Qwen3-30B-A3B."""
_OTHER_RULES = (
    RoutingRules(num_experts=8, num_chosen=2, mode=RoutingMode.CHOSEN_SOFTMAX),
    RoutingRules(num_experts=16, num_chosen=2, mode=RoutingMode.SPARSE_MIXER, jitter=0.01),
    RoutingRules(
        num_experts=256,
        num_chosen=8,
        mode=RoutingMode.SIGMOID,
        normalizes=True,
        num_groups=8,
        num_chosen_groups=4,
    ),
)
_COUNTS = {"decode": 32, "prefill": 2048}
"""Token counts: each has its own tiles."""
_SCALED = (WeightPrecision.INT8, WeightPrecision.INT4, WeightPrecision.FP8)


def cases() -> Cases:
    """What the host makes for a step is made here, where tensors are real."""
    made: Cases = {}
    batches = {"decode": host_batch([1] * 32), "prefill": host_batch([1400, 1, 1, 646])}
    for step, count in _COUNTS.items():
        for kind, dtype in DTYPES.items():
            name = f"{_shape(kind)} {kind} experts {step}"
            made[name] = functools.partial(_layer, dtype, count, batches[step])
            for precision in _SCALED:
                name = f"a3b {precision.value} {kind} experts {step}"
                made[name] = functools.partial(_products, dtype, count, precision)
        some = functools.partial(_products, dtype=torch.bfloat16, num_tokens=count)
        made[f"a3b bf16 experts {step} invariant"] = functools.partial(some, batch_invariant=True)
    some = functools.partial(_products, torch.bfloat16, 300)
    for precision in WeightPrecision:
        made[f"a3b {precision.value} bf16 experts mixed"] = functools.partial(some, precision)
    for form in STORED:
        for count in (4, 300, 4096):
            stored = functools.partial(_stored_products, form, count)
            made[f"a3b stored {form} bf16 experts {count}"] = stored
    made["other rules of experts"] = _other_rules
    return made


def _shape(kind: str) -> str:
    """The steps that every run of the tests compiles have the name of the others, "8b"."""
    return "8b" if kind == "bf16" else "a3b"


def _layer(dtype: torch.dtype, num_tokens: int, made: tuple[LoraBatch, LoraSegments]) -> None:
    routes = experts.route(empty(num_tokens, RULES.num_experts, dtype=dtype), RULES)
    batch = expert_batch(dtype, made)
    kernel, x = CudaLora(GPU, batch_invariant=False), empty(num_tokens, HIDDEN, dtype=dtype)
    inner = empty(num_tokens * RULES.num_chosen, 2 * INNER, dtype=dtype)
    kernel.add_experts(inner, x, batch, routes, LoraPlace(3, tuple(MODULES)[:2], (0, INNER)))
    y = empty(num_tokens * RULES.num_chosen, HIDDEN, dtype=dtype)
    kernel.add_experts(y, inner[:, :INNER], batch, routes, LoraPlace(3, tuple(MODULES)[2:], (0,)))
    y = _products(dtype, num_tokens, routes=routes)
    assert _combined(y, routes).shape == (num_tokens, HIDDEN)


def _products(
    dtype: torch.dtype,
    num_tokens: int,
    precision: WeightPrecision = WeightPrecision.NATIVE,
    *,
    batch_invariant: bool = False,
    routes: Routes | None = None,
) -> torch.Tensor:
    """The up and down products of a layer."""
    kernel = GroupedLinear(GPU, batch_invariant=batch_invariant)
    routes = routes or experts.route(empty(num_tokens, RULES.num_experts, dtype=dtype), RULES)
    x = empty(num_tokens, HIDDEN, dtype=dtype)
    kernel.apply(x, _packed(2 * INNER, HIDDEN, dtype, precision), routes)
    inner = empty(num_tokens * RULES.num_chosen, INNER, dtype=dtype)
    return kernel.apply(inner, _packed(HIDDEN, INNER, dtype, precision), routes)


def _stored_products(form: str, num_tokens: int) -> None:
    routes = experts.route(empty(num_tokens, RULES.num_experts, dtype=torch.bfloat16), RULES)
    weight = empty(RULES.num_experts, HIDDEN, INNER, dtype=torch.bfloat16)
    inner = empty(num_tokens * RULES.num_chosen, INNER, dtype=torch.bfloat16)
    kernel = GroupedLinear(GPU, batch_invariant=False)
    kernel.apply(inner, STORED[form].empty(weight, None), routes)


def _packed(
    out_features: int, in_features: int, dtype: torch.dtype, precision: WeightPrecision
) -> CudaWeight:
    weight = empty(RULES.num_experts, out_features, in_features, dtype=dtype)
    bias = empty(RULES.num_experts, out_features, dtype=dtype)
    if precision is WeightPrecision.NATIVE:
        return pack_weight(weight, None, precision)
    return empty_weight(weight, bias, precision)


def expert_batch(dtype: torch.dtype, made: tuple[LoraBatch, LoraSegments]) -> LoraBatch:
    """The batch that `host_batch` made with adapters of experts, where tensors are fake."""
    cells = LoraCells(
        [MODULES] * _NUM_LAYERS, [dict.fromkeys(MODULES, RULES.num_experts)] * _NUM_LAYERS
    )
    return device_batch(dtype, made, cells)


def _combined(y: torch.Tensor, routes: Routes) -> torch.Tensor:
    num_tokens = len(routes.experts)
    shared, gate = empty(num_tokens, HIDDEN, dtype=y.dtype), empty(num_tokens, 1, dtype=y.dtype)
    experts.combine_experts(y, routes, shared, gate)
    return experts.combine_experts(y, routes)


def _other_rules() -> None:
    for rules in _OTHER_RULES:
        logits = empty(32, rules.num_experts, dtype=torch.bfloat16)
        bias = None
        if rules.mode is RoutingMode.SIGMOID:
            bias = empty(rules.num_experts, dtype=torch.float32)
        experts.route(logits, rules, bias)
        experts.route(logits, rules, bias, empty(rules.num_experts, dtype=torch.float32))
