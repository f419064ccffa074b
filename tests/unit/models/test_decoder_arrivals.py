"""A decoder's layers wait for adapters that are still arriving, each for its own part of them."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from loraplex.core.adapter import OUTSIDE_LAYERS, LoraTarget
from loraplex.core.plan import CacheGroupCapacity
from loraplex.core.rank_limits import RankLimits
from loraplex.core.weight_precision import WeightPrecision
from loraplex.execution.adapters.bank import AdapterBank
from loraplex.execution.adapters.host_adapters import HostAdapter, HostWeight
from loraplex.execution.adapters.layout import pieces_of
from loraplex.execution.steps.kv_cache import KVCache
from loraplex.execution.weights.loading import load_weights
from loraplex.execution.weights.packing import WeightFormat
from loraplex.kernels.lora import LoraBatch
from loraplex.kernels.ops import RowLayout
from loraplex.kernels.reference import ReferenceKernels
from loraplex.memory.adapter_pages import layer_targets, page_geometry, place
from loraplex.models.batch import ForwardBatch
from loraplex.models.cache_groups import cache_groups
from loraplex.models.decoder import Decoder
from loraplex.models.rope import rotary_tables
from support.delayed_accelerator import DelayedAccelerator
from support.tiny_model import TinyCheckpoint

CPU, NUM_LAYERS, BLOCK_SIZE = torch.device("cpu"), 4, 4
PROMPT = [3, 17, 8, 40]
FAMILIES: dict[str, Mapping[str, Any]] = {
    "llama": {},
    "gemma4": {
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "layer_types": ["full_attention"] * NUM_LAYERS,
        "head_dim": 8,
        "global_head_dim": 8,
        "hidden_size_per_layer_input": 6,
        "vocab_size_per_layer_input": 50,
    },
}
"""Fields of config.json. A module of Gemma 4's first layer is read before any layer."""


class Model:
    def __init__(self, folder: Path, fields: Mapping[str, Any]) -> None:
        checkpoint = TinyCheckpoint(folder, num_hidden_layers=NUM_LAYERS, **fields)
        self.config, kernels = checkpoint.config, ReferenceKernels(CPU)
        form = WeightFormat(dtype=torch.float32, precision=WeightPrecision.NATIVE, device=CPU)
        weights = load_weights(checkpoint.save(), self.config, kernels, form, None)
        rotary = rotary_tables(self.config, 64, CPU)
        groups = cache_groups(self.config, 64)
        self.decoder = Decoder(
            self.config,
            weights.parameters,
            rotary,
            kernels,
            cache_groups=groups,
            block_size=BLOCK_SIZE,
        )
        self.kv = KVCache(
            groups,
            [CacheGroupCapacity(num_blocks=1)],
            self.config.num_layers,
            BLOCK_SIZE,
            torch.float32,
            kernels,
            device=CPU,
        ).storages

    def bank(self, accelerator: DelayedAccelerator | None) -> AdapterBank:
        """Make a bank with one adapter, on its way: of rank 2 on every layer but the second."""
        layers = self.config.module_shapes
        geometry = page_geometry(
            layer_targets(layers), usual_ranks=RankLimits(1), max_ranks=RankLimits(2)
        )
        bank = AdapterBank(
            geometry,
            12,
            dtype=torch.float32,
            device=CPU,
            layers=layers,
            accelerator=accelerator,
        )
        host = HostAdapter("digest", tuple(random_weights(layer_targets(layers, RankLimits(2)))))
        num_pages = place(pieces_of(host), geometry).num_pages
        assert num_pages >= NUM_LAYERS - 1, "the layers arrive one by one"
        bank.copy(1, bank.prepare(host), list(range(num_pages)))
        return bank

    def logits(self, lora: LoraBatch | None) -> torch.Tensor:
        count = len(PROMPT)
        batch = ForwardBatch(
            torch.tensor(PROMPT),
            torch.arange(count),
            (torch.arange(count),),
            (RowLayout([0, count], [count], torch.tensor([[0]])),),
            torch.arange(count),
            lora,
        )
        return self.decoder.forward(batch, self.kv)


def random_weights(targets: list[LoraTarget]) -> list[HostWeight]:
    generator = torch.Generator().manual_seed(0)
    return [
        HostWeight(
            target,
            torch.randn(target.rank, target.in_features, generator=generator),
            torch.randn(target.out_features, target.rank, generator=generator),
            1.0,
        )
        for target in targets
        if target.layer != 1
    ]


def batch_of(bank: AdapterBank) -> LoraBatch:
    batch = bank.lora_batch(((len(PROMPT), ((1, 1.0),)),))
    assert batch is not None
    return batch


@pytest.fixture
def model(tmp_path: Path, request: pytest.FixtureRequest) -> Model:
    return Model(tmp_path, FAMILIES[getattr(request, "param", "llama")])


@pytest.mark.parametrize("model", FAMILIES, indirect=True)
def test_an_adapter_that_is_arriving_changes_no_logit(model: Model) -> None:
    expected = model.logits(batch_of(model.bank(None)))
    assert not torch.equal(expected, model.logits(None))
    accelerator = DelayedAccelerator(most_polls=10**9)
    bank = model.bank(accelerator)
    batch = batch_of(bank)
    assert batch.arrivals is not None
    with accelerator.compute():
        assert torch.equal(model.logits(batch), expected)
    careless = dataclasses.replace(batch_of(model.bank(accelerator)), arrivals=None)
    with accelerator.compute():
        assert model.logits(careless).isnan().any(), "it had not arrived"
    accelerator.synchronize()


class Watched:
    """Implements Arrivals."""

    def __init__(self) -> None:
        self.layers: list[int] = []

    def wait_for(self, layer: int) -> None:
        self.layers.append(layer)


@pytest.mark.parametrize(("model", "ahead"), [("llama", []), ("gemma4", [0])], indirect=["model"])
def test_every_layer_waits_in_its_turn_and_at_every_step(model: Model, ahead: list[int]) -> None:
    batch, watched = batch_of(model.bank(None)), Watched()
    for count in (1, 2):
        model.logits(dataclasses.replace(batch, arrivals=watched))
        assert watched.layers == [OUTSIDE_LAYERS, *ahead, *range(NUM_LAYERS)] * count


def test_a_step_that_waits_is_not_repeated_from_a_record(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> torch.Tensor:
        raise AssertionError("repeated")

    monkeypatch.setattr(ReferenceKernels, "repeat", refused)
    batch = batch_of(model.bank(None))
    model.logits(dataclasses.replace(batch, arrivals=Watched()))
    with pytest.raises(AssertionError, match="repeated"):
        model.logits(batch)
