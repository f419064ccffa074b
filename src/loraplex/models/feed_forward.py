"""Feed-forward part of a decoder layer: dense, or with experts, of which a few compute a token."""

import functools
from collections.abc import Callable

import torch
from torch.nn import functional

from loraplex.kernels.lora import LoraBatch
from loraplex.kernels.ops import Kernels
from loraplex.kernels.routing import Routes
from loraplex.models.mixers.mixer import LayerPlace, MixerInputs, Part
from loraplex.models.norm import Norm
from loraplex.models.parameters import EXPERT_FACTORS, SELECTION_BIAS, XIELU, LayerParameters
from loraplex.models.spec import (
    DOWN,
    LATENT_INPUT,
    LATENT_OUTPUT,
    ROUTER,
    SHARED_DOWN,
    SHARED_GATE,
    SHARED_UP,
    UP,
    FeedForwardSpec,
    NormPlace,
)


def feed_forward(
    spec: FeedForwardSpec,
    place: LayerPlace,
    parameters: LayerParameters,
    kernels: Kernels,
    norm: Callable[[NormPlace], Norm],
) -> Part:
    """Return the layer's feed-forward part; parameters: packed by these kernels.

    norm: returns that of a place within the layer.
    """
    if spec.routing is None:
        return DenseFeedForward(spec, place, parameters, kernels)
    experts = ExpertFeedForward(spec, place, parameters, kernels)
    if str(NormPlace.BEFORE_ROUTER) not in parameters.norms:
        return experts
    return SeparatelyNormed(experts, kernels, norm)


class DenseFeedForward:
    """down(activation(up(x))), or with a gate down(activation(gate(x)) * up(x))."""

    def __init__(
        self,
        spec: FeedForwardSpec,
        place: LayerPlace,
        parameters: LayerParameters,
        kernels: Kernels,
    ) -> None:
        activate = kernels.gate if spec.is_gated else kernels.activate
        self._activate = functools.partial(activate, activation=spec.activation)
        if spec.xielu:
            # The article's two factors are positive, and the second one greater than a half.
            positive, above_half = functional.softplus(parameters.tensors[XIELU].double()).tolist()
            self._activate = functools.partial(
                kernels.xielu, positive=positive, negative=above_half + 0.5
            )
        self._up = place.linear(UP, parameters, kernels)
        self._down = place.linear(DOWN, parameters, kernels)

    def forward(
        self, x: torch.Tensor, lora: LoraBatch | None, _inputs: MixerInputs
    ) -> torch.Tensor:
        """x [T, hidden] -> [T, hidden]."""
        return self._down.forward(self._activate(self._up.forward(x, lora)), lora)


class ExpertFeedForward:
    """Sum of the chosen experts by their weights, and of a shared one if there is one."""

    def __init__(
        self,
        spec: FeedForwardSpec,
        place: LayerPlace,
        parameters: LayerParameters,
        kernels: Kernels,
    ) -> None:
        assert spec.routing is not None
        self._rules = spec.routing
        self._selection_bias = parameters.tensors.get(SELECTION_BIAS)
        self._expert_factors = parameters.tensors.get(EXPERT_FACTORS)
        self._activation = spec.activation
        self._activate = kernels.gate if spec.is_gated else kernels.activate
        self._kernels = kernels
        self._up = place.linear(UP, parameters, kernels)
        self._down = place.linear(DOWN, parameters, kernels)
        plain = {
            name: place.linear(name, parameters, kernels)
            for name in (
                *(ROUTER, LATENT_INPUT, LATENT_OUTPUT),
                *(SHARED_UP, SHARED_DOWN, SHARED_GATE),
            )
            if name in place.linears
        }
        self._router = plain[ROUTER]
        self._latent_input, self._latent_output = plain.get(LATENT_INPUT), plain.get(LATENT_OUTPUT)
        self._shared_up, self._shared_down = plain.get(SHARED_UP), plain.get(SHARED_DOWN)
        self._shared_gate = plain.get(SHARED_GATE)

    def forward(
        self, x: torch.Tensor, lora: LoraBatch | None, _inputs: MixerInputs
    ) -> torch.Tensor:
        """x [T, hidden] -> [T, hidden]."""
        routes = self.routes(x, lora)
        latent = x if self._latent_input is None else self._latent_input.forward(x, lora)
        y = self.of_pairs(latent, lora, routes)
        shared, gate = self.shared(x, lora)
        if self._rules.weighs_input:
            assert shared is not None
            assert gate is None
            return self._kernels.add(y, shared)
        if self._latent_output is None:
            return self._kernels.combine_experts(y, routes, shared, gate)
        combined = self._kernels.combine_experts(y, routes)
        wide = self._latent_output.forward(combined, lora)
        assert gate is None, "no family has both"
        return wide if shared is None else self._kernels.add(wide, shared)

    def routes(self, x: torch.Tensor, lora: LoraBatch | None) -> Routes:
        """Choose the experts of x [T, hidden]."""
        logits = self._router.forward(x, lora)
        return self._kernels.route(logits, self._rules, self._selection_bias, self._expert_factors)

    def of_pairs(self, x: torch.Tensor, lora: LoraBatch | None, routes: Routes) -> torch.Tensor:
        """x [T, in] -> [T * k, in] of the pairs, or of weighed inputs their sum [T, in]."""
        up = self._up.forward_pairs(x, lora, routes)
        if self._rules.weighs_input:
            # Linear layers of weighed inputs give weighed outputs.
            up = self._kernels.combine_experts(up, routes)
        inner = self._activate(up, self._activation)
        return self._down.forward_pairs(inner, lora, routes)

    def shared(
        self, x: torch.Tensor, lora: LoraBatch | None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the shared expert's output [T, hidden] and its gate [T, 1], where there are."""
        if self._shared_up is None or self._shared_down is None:
            return None, None
        inner = self._activate(self._shared_up.forward(x, lora), self._activation)
        gate = None if self._shared_gate is None else self._shared_gate.forward(x, lora)
        return self._shared_down.forward(inner, lora), gate


class SeparatelyNormed:
    """Experts and a shared expert that read the residual, and norm what they read and give.

    The router has a norm of its own, too (Gemma 4).
    """

    def __init__(
        self, experts: ExpertFeedForward, kernels: Kernels, norm: Callable[[NormPlace], Norm]
    ) -> None:
        self._experts = experts
        self._kernels = kernels
        self._before_router = norm(NormPlace.BEFORE_ROUTER)
        self._before_experts = norm(NormPlace.BEFORE_EXPERTS)
        self._after_experts = norm(NormPlace.AFTER_EXPERTS)
        self._before_shared = norm(NormPlace.BEFORE_SHARED)
        self._after_shared = norm(NormPlace.AFTER_SHARED)

    def forward(
        self, x: torch.Tensor, lora: LoraBatch | None, _inputs: MixerInputs
    ) -> torch.Tensor:
        """x [T, hidden] -> [T, hidden]."""
        routes = self._experts.routes(self._before_router.apply(x), lora)
        pairs = self._experts.of_pairs(self._before_experts.apply(x), lora, routes)
        combined = self._after_experts.apply(self._kernels.combine_experts(pairs, routes))
        shared, gate = self._experts.shared(self._before_shared.apply(x), lora)
        assert shared is not None
        assert gate is None, "no family has both"
        return self._kernels.add(combined, self._after_shared.apply(shared))
