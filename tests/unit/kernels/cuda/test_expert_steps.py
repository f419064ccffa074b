"""A layer with experts, recorded and replayed with other tokens, routes and adapters."""

import pytest
import torch

from loraplex.core.weight_precision import WeightPrecision
from loraplex.kernels.accelerator import HostAccelerator
from loraplex.kernels.activations import Activation
from loraplex.kernels.cuda.backend import CudaKernels
from loraplex.kernels.lora import LoraBatch, LoraPlace
from loraplex.kernels.ops import Kernels
from loraplex.kernels.reference import ReferenceKernels
from loraplex.kernels.routing_rules import RoutingMode, RoutingRules
from support.pooled_adapters import BASE, PooledAdapters, token_uses

HOST = torch.device("cpu")
HIDDEN, INNER, NUM_TOKENS = 48, 32, 4
RULES = RoutingRules(num_experts=5, num_chosen=2, mode=RoutingMode.SOFTMAX, normalizes=True)
UP, DOWN = ("experts.gate_proj", "experts.up_proj"), ("experts.down_proj",)
SHAPES = {UP[0]: (HIDDEN, INNER), UP[1]: (HIDDEN, INNER), DOWN[0]: (INNER, HIDDEN)}


class Layer:
    """The ops of models.feed_forward, on one backend."""

    def __init__(self, kernels: Kernels, precision: WeightPrecision) -> None:
        generator = torch.Generator().manual_seed(0)

        def packed(*sizes: int):
            weight = torch.randn(sizes, generator=generator) / sizes[-1] ** 0.5
            bias = torch.randn(sizes[:-1], generator=generator)
            return kernels.pack_linear(weight, bias, precision)

        self.kernels = kernels
        self.router = kernels.pack_linear(
            torch.randn(RULES.num_experts, HIDDEN, generator=generator), None
        )
        self.up = packed(RULES.num_experts, 2 * INNER, HIDDEN)
        self.down = packed(RULES.num_experts, HIDDEN, INNER)

    def step(self, x: torch.Tensor, lora: LoraBatch) -> torch.Tensor:
        return self.kernels.repeat("4 tokens", (x, lora), lambda: self.forward(x, lora))

    def forward(self, x: torch.Tensor, lora: LoraBatch) -> torch.Tensor:
        kernels = self.kernels
        routes = kernels.route(kernels.linear(x, self.router), RULES)
        up = kernels.grouped_linear(x, self.up, routes)
        kernels.add_expert_lora(up, x, lora, routes, LoraPlace(1, UP, (0, INNER)))
        inner = kernels.gate(up, Activation.CLAMPED_SWIGLU)
        down = kernels.grouped_linear(inner, self.down, routes)
        kernels.add_expert_lora(down, inner, lora, routes, LoraPlace(1, DOWN, (0,)))
        return kernels.combine_experts(down, routes, x)


@pytest.mark.some(1)
@pytest.mark.parametrize("precision", [WeightPrecision.NATIVE, WeightPrecision.INT8])
def test_a_recorded_layer_computes_other_steps(precision):
    torch.default_generator.manual_seed(0)
    experts = dict.fromkeys(SHAPES, RULES.num_experts)
    adapters = PooledAdapters(3, (3, 0, 17), SHAPES, torch.float32, num_experts=experts)
    kernels = CudaKernels(HostAccelerator())
    layer, reference = Layer(kernels, precision), Layer(ReferenceKernels(HOST), precision)

    def batch(chosen):
        return adapters.batch(token_uses(chosen), NUM_TOKENS)

    with kernels.recording():
        layer.step(torch.randn(NUM_TOKENS, HIDDEN), batch([0]))
    assert "4 tokens" in kernels.graphs
    for chosen in ([2, 1, 0, 2], [BASE, 1], [1, BASE, BASE, 0]):
        x, lora = torch.randn(NUM_TOKENS, HIDDEN), batch(chosen)
        found, expected = layer.step(x, lora), reference.forward(x, lora)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
