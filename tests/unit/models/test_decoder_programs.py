"""Every family's steps become programs of native calls: each op's values are known."""

import dataclasses
import gc
import itertools
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from loraplex.core.adapter import each_expert
from loraplex.core.plan import CacheGroupCapacity
from loraplex.core.rank_limits import RankLimits
from loraplex.core.weight_precision import WeightPrecision
from loraplex.execution.adapters.bank import AdapterBank
from loraplex.execution.adapters.host_adapters import HostAdapter, HostWeight
from loraplex.execution.adapters.layout import pieces_of
from loraplex.execution.steps.kv_cache import KVCache
from loraplex.execution.weights.loading import load_weights
from loraplex.execution.weights.packing import WeightFormat
from loraplex.kernels.adapter_parts import AdapterParts, OutputVector, PartsUse
from loraplex.kernels.lora import LoraBatch
from loraplex.kernels.native.backend import NativeKernels
from loraplex.kernels.native.library import NativeLibraryError, load_library
from loraplex.kernels.ops import RowLayout, Storage
from loraplex.memory.adapter_pages import layer_targets, page_geometry, place
from loraplex.models.batch import ForwardBatch, StateRows
from loraplex.models.cache_groups import cache_groups
from loraplex.models.decoder import Decoder
from loraplex.models.rope import rotary_tables
from loraplex.models.specs.convolution import ConvSpec
from support.tiny_model import TinyCheckpoint

try:
    LIBRARY = load_library()
except NativeLibraryError as error:
    pytest.skip(f"the native kernels are not built: {error}", allow_module_level=True)

CPU, BLOCK_SIZE = torch.device("cpu"), 4
FAMILIES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {"sliding_window": 3},
    "Qwen2ForCausalLM": {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1},
    "Qwen3ForCausalLM": {"head_dim": 8},
    "GPT2LMHeadModel": {"n_embd": 16, "n_head": 4, "n_layer": 2, "n_positions": 64},
    "MixtralForCausalLM": {"num_local_experts": 3, "num_experts_per_tok": 2},
    "Lfm2ForCausalLM": {
        "layer_types": ["conv", "full_attention"],
        "block_auto_adjust_ff_dim": False,
        "tie_word_embeddings": False,
    },
    "Qwen2MoeForCausalLM": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
        "shared_expert_intermediate_size": 12,
        "mlp_only_layers": [0],
    },
}


class Model:
    def __init__(self, folder: Path, architecture: str, *, has_groups: bool = True) -> None:
        """has_groups: False: all layers share their block tables, whatever their windows."""
        fields = FAMILIES[architecture]
        checkpoint = TinyCheckpoint(folder, architectures=[architecture], **fields)
        self.spec, self.kernels = checkpoint.config, NativeKernels(LIBRARY, 1)
        form = WeightFormat(dtype=torch.float32, precision=WeightPrecision.NATIVE, device=CPU)
        weights = load_weights(checkpoint.save(), self.spec, self.kernels, form, None)
        groups = cache_groups(self.spec, 64)
        if not has_groups:
            layers = tuple(range(self.spec.num_layers))
            caches = tuple(cache for group in groups for cache in group.caches)
            groups = (dataclasses.replace(groups[0], layers=layers, caches=caches),)
        self.decoder = Decoder(
            self.spec,
            weights.parameters,
            rotary_tables(self.spec, 64, CPU),
            self.kernels,
            cache_groups=groups,
            block_size=BLOCK_SIZE,
        )
        capacities = [CacheGroupCapacity(num_blocks=4)] * len(groups)
        self.kv = KVCache(
            groups,
            capacities,
            self.spec.num_layers,
            BLOCK_SIZE,
            torch.float32,
            self.kernels,
            device=CPU,
        ).storages
        tables = (torch.tensor([[0, 1], [2, 3]]), torch.tensor([[3, 0], [1, 2]]))
        self.tables = tables[: len(groups)]
        """Tables of two rows, for each group."""

    def batch(self, position: int, lora: LoraBatch | None = None) -> ForwardBatch:
        """Return one token of each of two rows."""
        return ForwardBatch(
            token_ids=torch.tensor([3, 5 + position]),
            positions=torch.tensor([position, position]),
            slot_mappings=tuple(
                table[:, position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
                for table in self.tables
            ),
            rows=tuple(RowLayout([0, 1, 2], [position + 1] * 2, table) for table in self.tables),
            logits_indices=torch.arange(2),
            lora=lora,
            state_rows=StateRows(
                torch.arange(3), {}, dict.fromkeys(range(len(self.tables)), torch.tensor([0, 2]))
            ),
        )

    def decode(self, position: int, lora: LoraBatch | None = None) -> torch.Tensor:
        return self.decoder.forward(self.batch(position, lora), self.kv).clone()

    def prefill(self, lengths: Sequence[int], lora: LoraBatch | None = None) -> torch.Tensor:
        """Return the logits of the last tokens of one or two prompts."""
        starts = [0, *itertools.accumulate(lengths)]
        positions = torch.cat([torch.arange(length) for length in lengths])
        row_of_token = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        states = None
        if isinstance(self.spec.layers[0].mixer, ConvSpec):
            tables = torch.arange(0, 2 * len(lengths), 2)
            states = StateRows(
                torch.tensor(starts), {}, dict.fromkeys(range(len(self.tables)), tables)
            )
        batch = ForwardBatch(
            token_ids=torch.arange(3, 3 + starts[-1]),
            positions=positions,
            slot_mappings=tuple(
                table[row_of_token, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
                for table in self.tables
            ),
            rows=tuple(
                RowLayout(starts, list(lengths), table[: len(lengths)]) for table in self.tables
            ),
            logits_indices=torch.tensor(starts[1:]) - 1,
            lora=lora,
            state_rows=states,
        )
        return self.decoder.forward(batch, self.kv).clone()

    def lora(self, num_tokens: int = 2) -> LoraBatch:
        """Make a batch whose tokens use one adapter of all modules."""
        layers, num_experts = self.spec.module_shapes, self.spec.num_experts
        geometry = page_geometry(
            layer_targets(layers, num_experts=num_experts),
            usual_ranks=RankLimits(2),
            max_ranks=RankLimits(2),
        )
        weights = [
            HostWeight(
                target,
                torch.randn(2, target.in_features),
                torch.randn(target.out_features, 2),
                1.0,
            )
            for target in each_expert(layer_targets(layers, RankLimits(2), num_experts))
        ]
        host = HostAdapter("digest", tuple(weights))
        num_pages = place(pieces_of(host), geometry).num_pages
        bank = AdapterBank(
            geometry,
            num_pages,
            dtype=torch.float32,
            device=CPU,
            layers=layers,
            num_experts=num_experts,
        )
        bank.copy(1, bank.prepare(host), list(range(num_pages)))
        batch = bank.lora_batch(((num_tokens, ((1, 1.0),)),))
        assert batch is not None
        return batch

    def with_vectors(self, lora: LoraBatch) -> LoraBatch:
        """Let the second row's adapter also change the outputs of modules, as DoRA does.

        Modules of experts have LoRA only.
        """
        parts = AdapterParts()
        for layer, modules in enumerate(self.spec.module_shapes):
            for module in modules.keys() - self.spec.num_experts[layer].keys():
                _, size = modules[module]
                vector = OutputVector(0, torch.randn(size), torch.randn(size))
                parts.vectors[layer, module] = [vector]
        use = PartsUse(parts, torch.tensor([1]), torch.tensor([0.5]))
        return dataclasses.replace(lora, parts=(use,))


@pytest.mark.parametrize("kind", ["base", "LoRA", "DoRA"])
@pytest.mark.parametrize("architecture", FAMILIES)
def test_decode_steps_are_repeated_by_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str, kind: str
) -> None:
    torch.default_generator.manual_seed(0)
    model = Model(tmp_path, architecture)
    lora = None if kind == "base" else model.lora()
    if lora is not None and kind == "DoRA":
        plain, lora = lora, model.with_vectors(lora)
        assert not torch.equal(model.decode(0, plain)[1], model.decode(0, lora)[1])
    repeated = [model.decode(position, lora) for position in range(6)]
    assert None not in model.kernels._programs.values()
    assert len(model.kernels._programs) == (2 if kind == "DoRA" else 1)
    monkeypatch.setattr(NativeKernels, "repeat", lambda _self, _key, _inputs, compute: compute())
    computed = [model.decode(position, lora) for position in range(6)]
    assert all(map(torch.equal, repeated, computed))


@pytest.mark.parametrize("has_lora", [False, True])
@pytest.mark.parametrize("architecture", FAMILIES)
def test_prompts_are_repeated_by_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str, has_lora: bool
) -> None:
    """Their records depend on the number of tokens, not on how many are of which prompt."""
    torch.default_generator.manual_seed(0)
    model = Model(tmp_path, architecture)
    lora = model.lora(num_tokens=4) if has_lora else None
    prompts = ((4,), (2, 2), (1, 3), (4,))
    repeated = [model.prefill(lengths, lora) for lengths in prompts]
    keeps_states = architecture == "Lfm2ForCausalLM"
    assert len(model.kernels._programs) == (0 if keeps_states else 1)
    assert None not in model.kernels._programs.values()
    monkeypatch.setattr(NativeKernels, "repeat", lambda _self, _key, _inputs, compute: compute())
    computed = [model.prefill(lengths, lora) for lengths in prompts]
    assert all(map(torch.equal, repeated, computed))
    assert torch.equal(repeated[0], repeated[-1])
    assert not torch.equal(repeated[0], repeated[1][1:])


def test_a_program_keeps_no_tensor_of_the_step_that_was_recorded(tmp_path: Path) -> None:
    model = Model(tmp_path, "LlamaForCausalLM")
    lora = model.lora()
    batch = model.batch(0, lora)
    tensors = [batch.token_ids, batch.positions, *batch.slot_mappings, lora.token_indices]
    of_step = [weakref.ref(tensor) for tensor in tensors]
    model.decoder.forward(batch, model.kv)
    model.decode(1, model.lora())  # the kernels remember the newest batch
    assert None not in model.kernels._programs.values()
    del batch, lora, tensors
    gc.collect()
    assert [ref() for ref in of_step] == [None] * len(of_step)


def test_a_program_is_of_its_storages_and_keeps_them(tmp_path: Path) -> None:
    """Another storage may be allocated where the first one was."""
    model = Model(tmp_path, "LlamaForCausalLM")
    model.decode(0)
    model.kv = ((*model.kv[0][:1], *model.kv[0][1:]),)
    model.decode(1)
    assert len(model.kernels._programs) == 1, "the same storages, in another tuple"
    first = weakref.ref(model.kv[0][0].tensors[0])
    model.kv = (
        tuple(
            Storage(tuple(tensor.clone() for tensor in storage.tensors)) for storage in model.kv[0]
        ),
    )
    expected = model.decode(2)
    assert len(model.kernels._programs) == 2
    assert torch.equal(model.decode(2), expected)
    gc.collect()
    assert first() is not None
    model.kernels.forget_recorded()
    gc.collect()
    assert first() is None


def test_layers_with_other_windows_may_have_blocks_of_their_own(tmp_path: Path) -> None:
    """Where they lie changes no logits."""
    grouped, joined = (
        Model(tmp_path, "Qwen2ForCausalLM", has_groups=has_groups) for has_groups in (True, False)
    )
    assert (len(grouped.tables), len(joined.tables)) == (2, 1)
    for position in range(6):
        assert torch.equal(grouped.decode(position, None), joined.decode(position, None))
