"""A kind of mixer is a value, a class and a row of one table: nothing else knows which there are.

Layers may lack a mixer or a feed-forward part.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import loraplex
from loraplex.core.adapter import LoraTarget
from loraplex.core.errors import ConfigError
from loraplex.core.plan import CacheGroupCapacity
from loraplex.core.rank_limits import RankLimits
from loraplex.execution.adapters.bank import AdapterBank
from loraplex.execution.adapters.host_adapters import HostAdapter, HostWeight
from loraplex.execution.adapters.layout import pieces_of
from loraplex.execution.steps.kv_cache import KVCache
from loraplex.kernels.lora import LoraBatch
from loraplex.kernels.native.backend import NativeKernels
from loraplex.kernels.native.channel import Segment, SharedMemoryChannel
from loraplex.kernels.native.library import NativeLibraryError, load_library
from loraplex.kernels.ops import RowLayout
from loraplex.memory.adapter_pages import layer_targets, page_geometry, place
from loraplex.models.batch import ForwardBatch
from loraplex.models.cache_groups import cache_groups
from loraplex.models.decoder import Decoder
from loraplex.models.linear_group import OutputSpan, TensorShard
from loraplex.models.mixers import kinds
from loraplex.models.parameters import build_parameters
from loraplex.models.rope import rotary_tables
from loraplex.models.sharding import shard
from loraplex.models.spec import LayerSpec, ModelSpec
from loraplex.models.specs.part import NormSpec, TensorSpec
from loraplex.models.stages import PipelineStage, stage
from support import toy_mixer
from support.naming import naming
from support.tiny_decoder import tiny_spec
from support.toy_mixer import (
    IN,
    OUT,
    RandomWeights,
    Toy,
    ToySpec,
    feed_forward_alone,
    mixer_alone,
    planned,
    toy_layer,
)

try:
    LIBRARY = load_library()
except NativeLibraryError as error:
    pytest.skip(f"the native kernels are not built: {error}", allow_module_level=True)

CPU, BLOCK_SIZE, PROMPT, UNITS = torch.device("cpu"), 4, [3, 14, 15, 92, 65, 35], 24
# Sums of such sizes have the same bits on one rank and on two (ADR 34).
PLAIN = tiny_spec(num_hidden_layers=3, head_dim=16, dtype="float32")


@pytest.fixture(autouse=True)
def known_toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kinds, "MIXERS", {**kinds.MIXERS, ToySpec: Toy})
    planned.clear()


def with_layers(*layers: LayerSpec) -> ModelSpec:
    return dataclasses.replace(PLAIN, layers=layers)


def toy(index: int) -> LayerSpec:
    return toy_layer(PLAIN.layers[index], UNITS, f"model.layers.{index}.")


def mixed() -> ModelSpec:
    """Return a model with a toy, attention alone, a toy alone, and a feed-forward part alone."""
    _, second, third = PLAIN.layers
    return with_layers(
        toy(0), mixer_alone(second), mixer_alone(toy(1)), feed_forward_alone(second), third
    )


class Model:
    """A decoder with random weights, and its KV storage."""

    def __init__(
        self,
        spec: ModelSpec,
        channel: SharedMemoryChannel | None = None,
        added: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        self.spec, self.kernels = spec, NativeKernels(LIBRARY, 1, channel)
        groups = cache_groups(spec, 64)
        self.decoder = Decoder(
            spec,
            build_parameters(spec, RandomWeights(self.kernels, added)),
            rotary_tables(spec, 64, CPU),
            self.kernels,
            cache_groups=groups,
            block_size=BLOCK_SIZE,
        )
        capacities = [CacheGroupCapacity(num_blocks=2)] * len(groups)
        self.kv = KVCache(
            groups, capacities, spec.num_layers, BLOCK_SIZE, torch.float32, self.kernels, device=CPU
        ).storages

    def forward(
        self,
        first: int,
        tokens: Sequence[int],
        lora: LoraBatch | None = None,
        hidden: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute tokens from a position on: the logits of the last one, or the hidden state."""
        end = first + len(tokens)
        places = torch.arange(first, end)
        batch = ForwardBatch(
            token_ids=torch.tensor(tokens),
            positions=places,
            slot_mappings=(places,),
            rows=(RowLayout([0, len(tokens)], [end], torch.tensor([[0, 1]])),),
            logits_indices=torch.tensor([len(tokens) - 1]),
            lora=lora,
        )
        return self.decoder.forward(batch, self.kv, hidden).clone()

    def lora(self, weights: Sequence[HostWeight]) -> LoraBatch:
        """Return a batch of the prompt's tokens that use an adapter."""
        layers, ranks = self.spec.module_shapes, RankLimits(2)
        geometry = page_geometry(layer_targets(layers), usual_ranks=ranks, max_ranks=ranks)
        host = HostAdapter("digest", tuple(weights))
        num_pages = place(pieces_of(host), geometry).num_pages
        bank = AdapterBank(geometry, num_pages, dtype=torch.float32, device=CPU, layers=layers)
        bank.copy(1, bank.prepare(host), list(range(num_pages)))
        batch = bank.lora_batch(((len(PROMPT), ((1, 1.0),)),))
        assert batch is not None
        return batch


def test_a_kind_needs_a_row_of_the_table_only() -> None:
    model = Model(mixed())
    logits = model.forward(0, PROMPT)
    assert planned == [len(PROMPT)], "both toys share one plan of the step"
    others = Model(with_layers(toy(0), *mixed().layers[1:2], *mixed().layers[3:]))
    assert not torch.equal(others.forward(0, PROMPT), logits)
    assert [len(shapes) for shapes in model.spec.module_shapes] == [5, 4, 2, 3, 7]
    assert [storage is None for storage in model.kv[0]] == [True, False, True, True, False]


def test_the_toy_computes_what_it_says() -> None:
    """The whole model in plain torch, as nothing but the toy mixes positions."""
    weights = RandomWeights(NativeKernels(LIBRARY, 1))
    spec = with_layers(mixer_alone(toy(0)))
    x = weights.tensor("model.embed_tokens.weight", (spec.vocab_size, spec.hidden_size))[PROMPT]

    def normed(y: torch.Tensor, name: str) -> torch.Tensor:
        scaled = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
        return scaled * weights.tensor(f"{name}.weight", (spec.hidden_size,))

    inner = normed(x, "model.layers.0.input_layernorm")
    inner = inner @ weights.tensor(f"model.layers.0.{IN}", (UNITS, spec.hidden_size)).T
    out = weights.tensor(f"model.layers.0.{OUT}", (spec.hidden_size, UNITS))
    y = normed(torch.nn.functional.silu(inner) @ out.T, "model.layers.0.norm")
    table = weights.tensor("model.layers.0.table", (toy_mixer.PERIOD, spec.hidden_size))
    x = x + y + table[torch.arange(len(PROMPT)) % toy_mixer.PERIOD]
    head = weights.tensor("lm_head", (spec.vocab_size, spec.hidden_size))
    expected = (normed(x, "model.norm") @ head.T)[-1:]
    # A model without attention has no cache group, which batches need; so one layer that adds zero.
    zero = {path: -weights.tensor(path, (32, 64)) for path in PLAIN.layers[2].linears["o"].paths}
    model = Model(with_layers(*spec.layers, mixer_alone(PLAIN.layers[2])), added=zero)
    torch.testing.assert_close(model.forward(0, PROMPT), expected, rtol=1e-4, atol=1e-5)


def test_parts_may_be_layers_of_their_own() -> None:
    """A part that is not there has no norms, and adds nothing."""
    pieces = [part(layer) for layer in PLAIN.layers for part in (mixer_alone, feed_forward_alone)]
    empty = mixer_alone(feed_forward_alone(PLAIN.layers[0]))
    assert empty.norms == {}
    whole, parts = Model(PLAIN), Model(with_layers(empty, *pieces, empty))
    assert torch.equal(whole.forward(0, PROMPT), parts.forward(0, PROMPT))
    assert torch.equal(whole.forward(6, [7]), parts.forward(6, [7]))
    assert parts.kernels._programs.keys(), "the decode step was recorded"
    assert None not in parts.kernels._programs.values()


def test_chunks_and_decode_steps_have_the_bits_of_a_prompt() -> None:
    whole, chunked = Model(mixed()), Model(mixed())
    expected = whole.forward(0, PROMPT)
    chunked.forward(0, PROMPT[:3])
    for position in (3, 4):
        chunked.forward(position, PROMPT[position : position + 1])
    assert torch.equal(chunked.forward(5, PROMPT[5:]), expected)
    assert None not in chunked.kernels._programs.values(), "decode steps with a toy are programs"


def test_a_second_mixer_follows_the_first() -> None:
    """`cross` is the part between the mixer and the feed-forward part, with norms of its own."""
    layer, other = PLAIN.layers[0], toy(1)
    norms = {
        toy_mixer.NormPlace.BEFORE_CROSS: other.norms[toy_mixer.NormPlace.BEFORE_MIXER],
    }
    linears = {name: group for name, group in other.linears.items() if name in (IN, OUT)}
    both = dataclasses.replace(
        layer,
        cross=other.mixer,
        norms={**layer.norms, **norms},
        linears={**layer.linears, **linears},
    )
    apart = (mixer_alone(layer), mixer_alone(other), feed_forward_alone(layer))
    assert torch.equal(
        Model(with_layers(both)).forward(0, PROMPT), Model(with_layers(*apart)).forward(0, PROMPT)
    )


def test_adapters_change_its_linear_layers() -> None:
    spec = mixed()
    shapes = spec.module_shapes[0]
    generator = torch.Generator().manual_seed(1)
    weights = [
        HostWeight(
            LoraTarget(0, module, 2, *shapes[module]),
            torch.randn(2, shapes[module][0], generator=generator),
            torch.randn(shapes[module][1], 2, generator=generator),
            0.5,
        )
        for module in (IN, OUT)
    ]
    added = {
        f"model.layers.0.{weight.target.module}": 0.5 * weight.b @ weight.a for weight in weights
    }
    model = Model(spec)
    adapted = model.forward(0, PROMPT, model.lora(weights))
    assert not torch.allclose(adapted, model.forward(0, PROMPT), atol=1e-2)
    merged = Model(spec, added=added).forward(0, PROMPT)
    torch.testing.assert_close(adapted, merged, rtol=1e-3, atol=1e-4)


def test_ranks_and_stages_have_the_bits_of_one() -> None:
    spec = mixed()
    expected = Model(spec).forward(0, PROMPT)
    segment = Segment(LIBRARY, 2, slot_bytes=4096)

    def of_rank(rank: int) -> torch.Tensor:
        torch.set_num_threads(1)
        channel = SharedMemoryChannel(LIBRARY, segment.address, rank)
        own = shard(spec, TensorShard(rank, 2))
        assert own.module_shapes[0][IN] == (spec.hidden_size, UNITS // 2)
        found = Model(own, channel).forward(0, PROMPT)
        channel.close()
        return found

    with ThreadPoolExecutor(2) as threads:
        for logits in threads.map(of_rank, range(2)):
            assert torch.equal(logits, expected)
    segment.close()
    hidden = None
    for index in range(3):
        hidden = Model(stage(spec, PipelineStage(index, 3))).forward(0, PROMPT, hidden=hidden)
    assert hidden is not None
    assert torch.equal(hidden, expected)


def test_ranks_that_cannot_share_it_are_refused_by_its_own_rule() -> None:
    spec = with_layers(toy_layer(PLAIN.layers[0], 6, "model.layers.0."), *PLAIN.layers[1:])
    with pytest.raises(ConfigError, match=naming(6, 4, "tensor_parallel_size", 1, 2)) as raised:
        shard(spec, TensorShard(0, 4))
    assert re.search(naming(1, 2, 6, 4, "tensor_parallel_size"), raised.value.message)
    assert raised.value.param == "tensor_parallel_size"


def test_no_layer_stands_for_all_outside_of_the_models() -> None:
    """Layers may differ in every part; which kinds are imported where is a contract of imports."""
    first = re.compile(r"\b(spec|config|whole|model|decoder)\.layers\[-?\d|\blayer\.attention\b")
    package = Path(loraplex.__file__).parent
    found = [
        f"{path.relative_to(package)}: {line.strip()}"
        for path in package.rglob("*.py")
        for line in path.read_text().splitlines()
        if first.search(line)
    ]
    assert found == []


def test_a_rank_has_several_spans_of_a_tensor() -> None:
    """A convolution over queries, keys and values side by side needs it."""
    source = RandomWeights(NativeKernels(LIBRARY, 1))
    spec = with_layers(mixer_alone(toy(0)))
    mixer = spec.layers[0].mixer
    assert mixer is not None
    whole = build_parameters(spec, source).layers[0].tensors["toy_table"]
    own = (OutputSpan(0, 1), OutputSpan(2, 3))

    class Cut(type(mixer)):  # type: ignore[misc]
        def tensors(self) -> Mapping[str, NormSpec | TensorSpec]:
            found = dict(super().tensors())
            table = found["toy_table"]
            assert isinstance(table, TensorSpec)
            return found | {"toy_table": table._replace(own=own)}

    fields = {field.name: getattr(mixer, field.name) for field in dataclasses.fields(mixer)}
    layer = dataclasses.replace(spec.layers[0], mixer=Cut(**fields))
    cut = build_parameters(with_layers(layer), source).layers[0].tensors["toy_table"]
    assert torch.equal(cut, whole[[0, 2]])
