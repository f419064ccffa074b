"""Native choice of experts and the sum of their results (native/include/loraplex/experts.h)."""

import ctypes

import torch

from loraplex.kernels.native.library import (
    DTYPES,
    Int,
    NativeLibrary,
    Pointer,
    Size,
    ThreadPool,
    Value,
)
from loraplex.kernels.routing import Routes
from loraplex.kernels.routing_rules import RoutingMode, RoutingRules

_MODES = {
    RoutingMode.SOFTMAX: 0,
    RoutingMode.CHOSEN_SOFTMAX: 1,
    RoutingMode.SIGMOID: 2,
    RoutingMode.SPARSE_MIXER: 3,
}
"""loraplex_routing_mode"""


class _Rules(ctypes.Structure):
    """loraplex_routing_rules"""

    _fields_ = (
        ("num_experts", Size),
        ("num_chosen", Size),
        ("num_groups", Size),
        ("num_chosen_groups", Size),
        ("factor", ctypes.c_double),
        ("jitter", ctypes.c_double),
        ("sum_floor", ctypes.c_double),
        ("mode", Int),
        ("normalizes", Int),
    )


class NativeExperts:
    """The weights are float32; results are rounded once, to the dtype of the inputs."""

    def __init__(self, library: NativeLibrary, pool: ThreadPool) -> None:
        self._pool = pool
        self._output = library.output
        self._rules: dict[RoutingRules, _Rules] = {}
        self._route = library.function(
            "loraplex_route",
            *(Pointer, Pointer, Size, Int, Value, Size, Pointer, Pointer),
            *(Value, Value, Value, Value),
        )
        self._combine = library.function(
            "loraplex_combine_experts",
            *(Pointer, Size, Size, Size, Int, Value),
            *(Value, Size, Value, Size, Value, Size, Value),
        )

    def route(
        self,
        logits: torch.Tensor,
        rules: RoutingRules,
        selection_bias: torch.Tensor | None = None,
        expert_factors: torch.Tensor | None = None,
    ) -> Routes:
        """logits [T, E], the others [E] float32; the choice is made in float64."""
        num_tokens, num_experts = logits.shape
        assert num_experts == rules.num_experts
        assert logits.stride(1) == 1 or num_experts == 1
        num_pairs = num_tokens * rules.num_chosen
        routes = Routes(
            self._output((num_tokens, rules.num_chosen), torch.int32),
            self._output((num_tokens, rules.num_chosen)),
            self._output((num_pairs,), torch.int32),
            self._output((num_experts + 1,), torch.int32),
        )
        self._route(
            *(self._pool.address, ctypes.addressof(self._rules_of(rules)), num_tokens),
            *(DTYPES[logits.dtype], logits.data_ptr(), logits.stride(0)),
            *(
                None if each is None else each.data_ptr()
                for each in (selection_bias, expert_factors)
            ),
            *(routes.experts.data_ptr(), routes.weights.data_ptr()),
            *(routes.pairs.data_ptr(), routes.starts.data_ptr()),
        )
        return routes

    def _rules_of(self, rules: RoutingRules) -> _Rules:
        """Return the structure of the rules; it stays."""
        if rules not in self._rules:
            self._rules[rules] = _Rules(
                *(rules.num_experts, rules.num_chosen),
                *(rules.num_groups, rules.num_chosen_groups),
                *(rules.factor, rules.jitter, rules.sum_floor),
                *(_MODES[rules.mode], rules.normalizes),
            )
        return self._rules[rules]

    def combine(
        self,
        y: torch.Tensor,
        routes: Routes,
        shared: torch.Tensor | None = None,
        shared_gate: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """y [T * k, N], shared [T, N], shared_gate [T, 1] -> [T, N]."""
        num_tokens, num_chosen = routes.weights.shape
        output = self._output((num_tokens, y.shape[1]), y.dtype)
        self._combine(
            *(self._pool.address, num_tokens, num_chosen, y.shape[1], DTYPES[y.dtype]),
            *(routes.weights.data_ptr(), y.data_ptr(), y.stride(0)),
            *_rows(shared),
            *_rows(shared_gate),
            output.data_ptr(),
        )
        return output


def _rows(tensor: torch.Tensor | None) -> tuple[int | None, int]:
    """Return the address of the rows and their stride."""
    return (None, 0) if tensor is None else (tensor.data_ptr(), tensor.stride(0))
