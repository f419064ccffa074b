"""Memory of a GPU's steps in addition to weights, KV cache and adapters: which steps are recorded,
an estimate of their bytes for where nothing can be measured, and the sizes that fit.
"""

import dataclasses
from collections.abc import Collection, Iterator
from typing import Final

import msgspec
import torch

from loraplex.core.engine_settings import MAX_GRAPH_BATCH_SIZE
from loraplex.core.step_sizes import LEAST_SIZES, StepSizes
from loraplex.execution.sizing.settings import RunnerSettings
from loraplex.kernels.routing_rules import RoutingRules
from loraplex.models.expert_config import EXPERT_DOWN_MODULE
from loraplex.models.spec import DOWN, SHARED_DOWN, LayerSpec, ModelSpec

_LIBRARIES_BYTES = 96 << 20
"""Memory that cuBLAS and the attention backends allocate once."""
_GRAPH_BYTES_PER_LAYER = 256 << 10
"""Memory of the driver for the nodes of one graph. An assumption that was not measured."""
_GRAPHS_PER_SIZE = 2
"""One without and one with LoRA."""
_ROUTE_BYTES = 12
"""Expert, weight and sorted place of one chosen expert."""
_FLOAT32_LOGITS = 3
"""Copies of the logits that a sampler with every option holds at once."""


@dataclasses.dataclass(frozen=True, slots=True)
class StepMemory:
    """Bytes for steps. On a CPU none are reserved."""

    workspace: int = 0
    """Bytes of the largest step."""
    graphs: int = 0
    """Bytes of the recorded steps."""


def graph_sizes(settings: RunnerSettings) -> tuple[int, ...]:
    """Return the numbers of sequences whose decode steps are recorded, ascending; () for none.

    The largest step that can be recorded is always among them if the operator named none.
    """
    if not settings.cuda_graphs:
        return ()
    largest = min(settings.max_num_seqs, MAX_GRAPH_BATCH_SIZE)
    default = (1, 2, 4, *range(8, 64, 8), *range(64, MAX_GRAPH_BATCH_SIZE, 16), largest)
    sizes = settings.cuda_graph_batch_sizes or default
    return tuple(sorted({size for size in sizes if size <= largest}))


def estimated_step_memory(
    settings: RunnerSettings, spec: ModelSpec, dtype: torch.dtype
) -> StepMemory:
    """Estimate the bytes by arithmetic, for where no step runs; a start measures instead."""
    workspace = (
        _LIBRARIES_BYTES
        + settings.max_num_batched_tokens * bytes_per_token(settings, spec, dtype)
        + settings.max_num_seqs * bytes_per_sequence(spec, dtype)
    )
    graph = spec.num_layers * _GRAPH_BYTES_PER_LAYER
    sizes = graph_sizes(settings)
    if not sizes:
        return StepMemory(workspace)
    inner = sizes[-1] * bytes_per_token(settings, spec, dtype)
    logits = sum(sizes) * spec.vocab_size * dtype.itemsize
    graphs = inner + _GRAPHS_PER_SIZE * (logits + len(sizes) * graph)
    return StepMemory(workspace, graphs)


def bytes_per_token(settings: RunnerSettings, spec: ModelSpec, dtype: torch.dtype) -> int:
    """Estimate the bytes of one more token of a step: a layer's activations that live at once."""
    itemsize = dtype.itemsize
    largest = max(
        sum(mixer.step_bytes(itemsize) for mixer in layer.mixers)
        + _feed_forward_values(layer) * itemsize
        for layer in spec.layers
    )
    layer_inputs = 3 * spec.num_layers * spec.layer_input_size
    activations = (4 * spec.hidden_size + layer_inputs) * itemsize + largest
    num_rows = max(_rows_per_token(layer) for layer in spec.layers)
    limits = settings.rank_limits
    rank = max(limits.largest, num_rows * limits.of(EXPERT_DOWN_MODULE) if num_rows > 1 else 0)
    routes = max(_route_bytes(layer) for layer in spec.layers)
    lora = 3 * rank * torch.float32.itemsize + routes
    ropes = {
        rope: head_dim
        for layer in spec.layers
        for mixer in layer.mixers
        for rope, head_dim in mixer.ropes().items()
    }
    angles = sum(ropes.values()) * torch.float32.itemsize
    return activations + lora + angles


def _rows_per_token(layer: LayerSpec) -> int:
    """Return the number of experts that compute a token; 1 without experts."""
    routing = _routing(layer)
    return 1 if routing is None else routing.num_chosen


def _routing(layer: LayerSpec) -> RoutingRules | None:
    return None if layer.feed_forward is None else layer.feed_forward.routing


def _feed_forward_values(layer: LayerSpec) -> int:
    """Return the values of a token in the feed-forward part: each chosen expert has its own."""
    if layer.feed_forward is None:
        return 0
    inner_size = layer.feed_forward.inner_size
    if layer.feed_forward.routing is None:
        return 3 * inner_size
    hidden_size = sum(layer.linears[DOWN].outputs.values())
    shared = layer.linears.get(SHARED_DOWN)
    values = _rows_per_token(layer) * (3 * inner_size + hidden_size)
    return values + (0 if shared is None else 3 * shared.in_features + hidden_size)


def _route_bytes(layer: LayerSpec) -> int:
    """Return the bytes of a token's scores, and of its chosen experts with their weights."""
    routing = _routing(layer)
    if routing is None:
        return 0
    return 2 * torch.float32.itemsize * routing.num_experts + _ROUTE_BYTES * routing.num_chosen


def bytes_per_sequence(spec: ModelSpec, dtype: torch.dtype) -> int:
    """Estimate the bytes of one more sequence of a step: its logits, and the sampler's copies."""
    return spec.vocab_size * (dtype.itemsize + _FLOAT32_LOGITS * torch.float32.itemsize)


_STEPS_SHARE: Final = 4
"""Steps with open sizes take at most 1 / 4 of what the weights leave: the rest is KV cache."""


def fitting_step_sizes(
    settings: RunnerSettings,
    spec: ModelSpec,
    dtype: torch.dtype,
    left: int,
    is_open: Collection[str],
) -> StepSizes:
    """Halve open sizes until steps take their share of memory, but not below the least sizes.

    left: bytes that the weights leave. is_open: names of the sizes that the operator left open.
    """

    def taken(tried: RunnerSettings) -> int:
        steps = estimated_step_memory(tried, spec, dtype)
        return steps.workspace + steps.graphs

    while taken(settings) * _STEPS_SHARE > left:
        smaller = min(_halved(settings, is_open), key=taken, default=None)
        if smaller is None:
            break
        settings = smaller
    return StepSizes(settings.max_num_seqs, settings.max_num_batched_tokens)


def _halved(settings: RunnerSettings, is_open: Collection[str]) -> Iterator[RunnerSettings]:
    """Yield the settings with one open size halved each."""
    least = {
        "max_num_seqs": LEAST_SIZES.max_num_seqs,
        "max_num_batched_tokens": max(LEAST_SIZES.max_num_batched_tokens, settings.max_num_seqs),
    }
    for name in is_open:
        half = getattr(settings, name) // 2
        if half >= least[name]:
            yield msgspec.structs.replace(settings, **{name: half})
