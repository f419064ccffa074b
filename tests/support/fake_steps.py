"""Steps of whole decoders on a GPU that is not there: what logits they give, by how many launches.

`python -m support.fake_steps` prints them as JSON. No kernel runs, nothing is compiled.
"""

import dataclasses
import functools
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from loraplex.kernels.accelerator import HostAccelerator
from loraplex.kernels.cuda.backend import CudaKernels
from loraplex.kernels.lora import LoraBatch, LoraCells
from loraplex.kernels.ops import AttentionShape, PackedLinear
from loraplex.models.batch import ForwardBatch
from loraplex.models.cache_groups import cache_groups
from loraplex.models.decoder import Decoder
from loraplex.models.parameters import LinearPlace, build_parameters
from loraplex.models.rope import rotary_tables
from loraplex.models.spec import ModelSpec
from loraplex.models.specs.attention import AttentionSpec
from support.kernel_cases.experts import HIDDEN, INNER, RULES
from support.kernel_cases.llamas import BLOCK_SIZE, GPU, LLAMAS, Llama, empty, mixed_rows
from support.kernel_cases.lora import device_batch, host_batch
from support.kernel_launches import LaunchRecorder
from support.tiny_decoder import tiny_spec

_ARCH = 90
_NUM_LAYERS = 32
_DTYPE = torch.bfloat16
_NUM_BLOCKS = 64
_NO_LAUNCH = ("device", "empty", "lift_fresh")


@dataclasses.dataclass(frozen=True, slots=True)
class FakeStep:
    model: str
    step: str
    shape: tuple[int, ...]
    dtype: str
    kernels: int
    """Launches of Triton kernels."""
    torch_ops: int
    """Operations of torch that are more than another view: about a launch each."""


class _FakeGpu(HostAccelerator):
    """All its work is fake."""

    @property
    def device(self) -> torch.device:
        return GPU


class _FakeWeights:
    """Implements models.parameters.ParameterSource."""

    def __init__(self, kernels: CudaKernels) -> None:
        self._kernels = kernels

    def tensor(
        self, _name: str, shape: tuple[int, ...], _num_rows: int | None = None
    ) -> torch.Tensor:
        return empty(*shape, dtype=_DTYPE)

    def linear(self, place: LinearPlace) -> PackedLinear:
        if place.is_embedding:
            return None
        experts = () if place.num_experts is None else (place.num_experts,)
        return self._kernels.pack_linear(empty(*experts, *place.shape, dtype=_DTYPE), None)


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what torch computes."""

    count = 0

    def __torch_dispatch__(
        self,
        func: Any,
        _types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = func.overloadpacket.__name__
        self.count += not func.is_view and not name.startswith(_NO_LAUNCH)
        return func(*args, **(kwargs or {}))


def fake_steps() -> list[FakeStep]:
    """A step that decodes 32 rows, and a mixed one, with and without an adapter for each row."""
    rows = {"decode": [1] * 32, "mixed": [1, 1, 300, 1, 40]}
    adapters = {step: host_batch(counts, num_waves=1) for step, counts in rows.items()}
    found = []
    for name, spec in _specs().items():
        recorder = LaunchRecorder(_ARCH)
        cells = LoraCells([layer.module_shapes for layer in spec.layers], spec.num_experts)
        with recorder.record():
            forward = _decoder(spec)
            for step, counts in rows.items():
                for has_lora in (False, True):
                    lora = device_batch(_DTYPE, adapters[step], cells) if has_lora else None
                    label = f"{step}, LoRA" if has_lora else step
                    found.append(_run(recorder, forward, name, label, counts, lora))
    return found


def _decoder(spec: ModelSpec) -> Callable[[ForwardBatch], torch.Tensor]:
    kernels = CudaKernels(_FakeGpu())
    parameters = build_parameters(spec, _FakeWeights(kernels))
    rotary, groups = rotary_tables(spec, 4096, GPU), cache_groups(spec, 4096)
    decoder = Decoder(spec, parameters, rotary, kernels, cache_groups=groups, block_size=BLOCK_SIZE)
    attention = next(spec.mixers_of(AttentionSpec))
    sizes = (attention.num_heads, attention.num_kv_heads, attention.head_dim)
    shape = AttentionShape(*sizes, BLOCK_SIZE)
    kv = (tuple(kernels.allocate_kv(_NUM_BLOCKS, shape, _DTYPE) for _ in spec.layers),)
    return functools.partial(decoder.forward, kv=kv)


def _run(
    recorder: LaunchRecorder,
    forward: Callable[[ForwardBatch], torch.Tensor],
    model: str,
    step: str,
    counts: Sequence[int],
    lora: LoraBatch | None,
) -> FakeStep:
    num_tokens = sum(counts)
    integers = functools.partial(empty, dtype=torch.int64)
    batch = ForwardBatch(
        token_ids=integers(num_tokens),
        positions=integers(num_tokens),
        slot_mappings=(integers(num_tokens),),
        rows=(mixed_rows(list(counts)),),
        logits_indices=integers(len(counts)),
        lora=lora,
    )
    before = len(recorder.launches)
    with _Counter() as counter:  # type: ignore[no-untyped-call]
        logits = forward(batch)
    return FakeStep(
        model,
        step,
        tuple(logits.shape),
        str(logits.dtype),
        len(recorder.launches) - before,
        counter.count,
    )


def _specs() -> dict[str, ModelSpec]:
    """The Llamas, and a model with experts of the sizes of Qwen3-30B-A3B."""
    specs = {name: _spec(llama) for name, llama in LLAMAS.items()}
    specs["a3b"] = tiny_spec(
        "Qwen3MoeForCausalLM",
        hidden_size=HIDDEN,
        num_hidden_layers=_NUM_LAYERS,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        moe_intermediate_size=INNER,
        num_experts=RULES.num_experts,
        num_experts_per_tok=RULES.num_chosen,
        norm_topk_prob=True,
        vocab_size=151936,
        max_position_embeddings=4096,
    )
    return specs


def _spec(llama: Llama) -> ModelSpec:
    return tiny_spec(
        hidden_size=llama.hidden,
        num_hidden_layers=_NUM_LAYERS,
        num_attention_heads=llama.num_heads,
        num_key_value_heads=llama.num_kv_heads,
        head_dim=llama.head_dim,
        intermediate_size=llama.inner,
        vocab_size=llama.vocab,
        max_position_embeddings=4096,
    )


if __name__ == "__main__":
    json.dump([dataclasses.asdict(step) for step in fake_steps()], sys.stdout)
