"""Parts of a runner, made from weights: with their share of the memory, or little for a trial.

Memory is divided in this order, and in bytes: weights, what the largest step takes, recorded steps,
KV cache, adapters.
"""

import contextlib
import dataclasses
import gc
from collections.abc import Iterator

import torch

from loraplex.core.adapter import each_expert
from loraplex.core.devices import processor_name
from loraplex.core.errors import StepFailedError
from loraplex.core.plan import AdapterShare, Capacity
from loraplex.core.task import PoolKind
from loraplex.execution.adapters.bank import AdapterBank, BaseEnds
from loraplex.execution.adapters.host_adapters import HostAdapter, HostAdapters, HostWeight
from loraplex.execution.adapters.rank_share import AdapterCutter
from loraplex.execution.grammar.compiler import VocabularySource
from loraplex.execution.grammar.rows import GrammarRows
from loraplex.execution.sampling.sampler import Sampler
from loraplex.execution.sizing.capacity import (
    AdapterPoolSize,
    MemorySize,
    choose_device,
    choose_dtype,
    choose_kv_dtype,
    head_of,
    rank_share,
    smallest_pool,
)
from loraplex.execution.sizing.kv import trial_kv_size
from loraplex.execution.sizing.measuring import (
    DUMMY_ADAPTER,
    Trials,
    largest_step,
    measure_graphs,
    measure_workspace,
    settled_memory,
)
from loraplex.execution.sizing.settings import RunnerSettings
from loraplex.execution.sizing.shortage import (
    MemoryAdvice,
    is_out_of_memory,
    out_of_memory_is,
)
from loraplex.execution.sizing.step_memory import StepMemory, graph_sizes
from loraplex.execution.steps.kv_cache import KVCache
from loraplex.execution.steps.model_runner import ModelRunner
from loraplex.execution.steps.runner_parts import RunnerParts
from loraplex.execution.steps.stages import StageLinks, TrialLinks, stage_sampler
from loraplex.execution.steps.text_inputs import TextEncoder
from loraplex.execution.vector_layers import VectorLayer
from loraplex.kernels.accelerator import Accelerator
from loraplex.kernels.channel import RankChannels
from loraplex.kernels.ops import Kernels
from loraplex.memory.adapter_pages import layer_targets
from loraplex.models.decoder import Decoder
from loraplex.models.encoder import Encoder
from loraplex.models.parameters import DecoderParameters
from loraplex.models.rope import rotary_tables, rotation_border
from loraplex.models.spec import ModelSpec

_BALANCED_TOKENS_OF_CPU = 12
"""5632 x 2048 in bfloat16 or int8 takes as long for the bytes of its weights as for the arithmetic
of 12 rows, on CPUs with AVX-512 and VNNI; in int4 7, with AMX up to 38 (docs/performance.md)."""
_TRIAL_BLOCKS = 64
"""Number of KV blocks of a trial: its results have no meaning, so its rows may share them."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Assembly:
    """What the parts are made from, except for their sizes."""

    spec: ModelSpec
    """The result of sizing.kv.windowed."""
    parameters: DecoderParameters
    """Packed by these kernels."""
    weights_bytes: int
    settings: RunnerSettings
    kernels: Kernels
    accelerator: Accelerator | None
    """That of the kernels."""
    channels: RankChannels | None = None
    """None: this is the only rank of its stage."""
    links: StageLinks | None = None
    """None: this is the only stage."""
    text_encoder: TextEncoder | None = None
    """None: that of spec.encoder, where it has layers."""
    vector_layers: tuple[VectorLayer, ...] = ()
    """Those of spec.vector_layers, on the last stage."""

    @property
    def adapter_share(self) -> AdapterShare | None:
        """What of an adapter this rank holds; None: all."""
        return rank_share(self.settings, self.spec)

    @property
    def device(self) -> torch.device:
        if self.accelerator is not None:
            return self.accelerator.device
        return choose_device(self.settings)

    @property
    def dtype(self) -> torch.dtype:
        return choose_dtype(self.settings, self.spec)

    @property
    def kv_dtype(self) -> torch.dtype:
        return choose_kv_dtype(self.settings, self.dtype)

    @property
    def advice(self) -> MemoryAdvice:
        return MemoryAdvice(self.settings, self.spec, self.dtype)

    @property
    def recorded_sizes(self) -> tuple[int, ...]:
        if self.accelerator is None or not self.spec.has_lm_head:
            return ()
        return graph_sizes(self.settings)

    def parts(
        self,
        size: MemorySize,
        host_adapters: HostAdapters,
        vocabulary: VocabularySource | None = None,
        steps: StepMemory | None = None,
    ) -> RunnerParts:
        """Allocate the parts. vocabulary: None: no output can be constrained by a grammar."""
        spec, device, settings = self.spec, self.device, self.settings
        rotary = rotary_tables(spec, size.kv.max_model_len, device)
        kv_cache = KVCache(
            size.kv.groups,
            size.kv.capacities,
            spec.num_layers,
            settings.block_size,
            self.kv_dtype,
            self.kernels,
            device=device,
            accelerator=self.accelerator,
        )
        decoder = Decoder(
            spec,
            self.parameters,
            rotary,
            self.kernels,
            cache_groups=size.kv.groups,
            block_size=settings.block_size,
            loads=None if self.channels is None else self.channels.loads,
        )
        share = self.adapter_share
        return RunnerParts(
            decoder=decoder,
            kv_cache=kv_cache,
            adapter_bank=self._adapter_bank(decoder, size.adapters),
            host_adapters=host_adapters,
            kernels=self.kernels,
            sampler=stage_sampler(self._sampler(vocabulary), self.links),
            capacity=self._capacity(size, kv_cache.num_bytes, steps or StepMemory()),
            device=device,
            adapter_cutter=AdapterCutter(spec, share) if self._is_part else None,
            links=self.links,
            accelerator=self.accelerator,
            text_encoder=self.text_encoder or self._encoder(size.kv.longest_encoder_input),
            vector_layers=self.vector_layers,
            recorded_sizes=self.recorded_sizes,
        )

    def _encoder(self, longest_input: int) -> TextEncoder | None:
        encoder = self.spec.encoder
        if encoder is None or not encoder.layers:
            return None
        return Encoder(
            self.spec,
            self.parameters,
            self.kernels,
            block_size=self.settings.block_size,
            longest_input=longest_input,
            device=self.device,
        )

    @property
    def _is_part(self) -> bool:
        return self.spec.shard_of is not None or self.spec.stage_of is not None

    def _sampler(self, vocabulary: VocabularySource | None) -> Sampler:
        size = self.spec.vocab_size
        is_alone = self.channels is None and self.links is None
        return Sampler(
            size,
            device=self.device,
            kernels=self.kernels,
            grammars=GrammarRows(size, vocabulary, defers=is_alone),
            logits_dir=self.settings.logits_dir,
        )

    def _adapter_bank(self, decoder: Decoder, size: AdapterPoolSize) -> AdapterBank:
        spec = self.spec
        return AdapterBank(
            size.geometry,
            size.num_pages,
            dtype=self.dtype,
            device=self.device,
            layers=spec.module_shapes,
            num_experts=spec.num_experts,
            ends=BaseEnds(
                head_of(spec),
                spec.tie_word_embeddings,
                decoder.base_linears,
            ),
            max_rank=self.settings.rank_limits.largest,
            accelerator=self.accelerator,
            is_alone=self.channels is None,
        )

    def _capacity(self, size: MemorySize, kv_cache_bytes: int, steps: StepMemory) -> Capacity:
        settings, kv, pool = self.settings, size.kv, size.adapters
        return Capacity(
            block_size=settings.block_size,
            cache_groups=kv.capacities,
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            num_balanced_tokens=_BALANCED_TOKENS_OF_CPU if self.device.type == "cpu" else 0,
            num_stages=1 if self.links is None else self.links.stage.size,
            generates=self.spec.has_lm_head,
            is_causal=self.spec.all_layers.is_causal,
            pool_kinds=tuple(
                kind for kind in PoolKind if kind is not PoolKind.LOGITS or self.spec.has_lm_head
            ),
            hidden_size=self.spec.vector_size,
            returns_logits=self.links is None,
            max_model_len=kv.max_model_len,
            longest_encoder_input=kv.longest_encoder_input,
            rotation_border=rotation_border(self.spec.all_layers, kv.max_model_len),
            vocab_size=self.spec.vocab_size,
            page_geometry=pool.geometry,
            num_adapter_pages=pool.num_pages,
            adapter_page_bytes=pool.page_bytes,
            adapter_table_bytes=pool.table_bytes,
            adapter_share=self.adapter_share,
            first_layers=self.spec.first_layers,
            host_page_bytes=0 if self.accelerator is None else pool.page_bytes,
            keeps_host_copy=self.accelerator is not None or self.device.type != "cpu",
            kv_cache_bytes=kv_cache_bytes,
            weights_bytes=self.weights_bytes,
            workspace_bytes=steps.workspace,
            graph_bytes=steps.graphs,
            device_name=(
                torch.cuda.get_device_name(self.device)
                if self.device.type == "cuda"
                else processor_name()
            ),
        )


def measure_steps(assembly: Assembly) -> StepMemory:
    """Measure the memory of steps by trials, which free all of it, if the accelerator can.

    Raises ConfigError if the device is too small for them.
    """
    accelerator = assembly.accelerator
    memory = None if accelerator is None else settled_memory(accelerator)
    if accelerator is None or memory is None:
        return StepMemory()
    available, advice = memory.free, assembly.advice
    with _trials(assembly, accelerator) as trials:
        with out_of_memory_is(lambda: advice.workspace(available)):
            workspace = measure_workspace(accelerator, trials)
        with out_of_memory_is(lambda: advice.graphs(available - workspace)):
            graphs = measure_graphs(accelerator, trials, assembly.recorded_sizes)
    return StepMemory(workspace, graphs)


@contextlib.contextmanager
def _trials(assembly: Assembly, accelerator: Accelerator) -> Iterator[Trials]:
    """Yield trials, whose parts exist from `set_up` to the end."""
    parts: list[RunnerParts] = []
    runners: list[ModelRunner] = []

    def set_up() -> None:
        parts.append(_trial_parts(assembly))

    def runner(recorded_sizes: tuple[int, ...]) -> ModelRunner:
        made = ModelRunner(dataclasses.replace(parts[0], recorded_sizes=recorded_sizes))
        runners.append(made)
        return made

    def run_largest_step() -> None:
        num_tokens = assembly.settings.max_num_batched_tokens
        trial = runner(())
        result = trial.launch(largest_step(trial.capacity(), num_tokens)).wait()
        for row in result.rows:
            # In a server a full memory fails rows one by one; a trial has to fail as a whole.
            if row.error is not None and is_out_of_memory(StepFailedError(row.error.message)):
                raise StepFailedError(row.error.message)

    def record(size: int) -> None:
        runner((size,)).record_steps()

    def forget() -> None:
        for made in runners:
            made.forget_steps()
        runners.clear()

    try:
        yield Trials(set_up, run_largest_step, record, forget)
    finally:
        forget()
        for made in parts:
            made.sampler.close()
        parts.clear()
        # A runner that failed may be held by the frames of its error.
        gc.collect()
        accelerator.trim()


def _trial_parts(assembly: Assembly) -> RunnerParts:
    """Make parts for one adapter and few blocks."""
    settings, spec = assembly.settings, assembly.spec
    if assembly.links is not None:
        links = TrialLinks(assembly.links.stage, spec.hidden_size, assembly.dtype)
        assembly = dataclasses.replace(assembly, links=links)
    size = MemorySize(
        trial_kv_size(settings, spec, assembly.kv_dtype, _TRIAL_BLOCKS),
        smallest_pool(settings, spec, assembly.dtype),
    )
    host_adapters = HostAdapters()
    parts = assembly.parts(size, host_adapters)
    adapter = parts.adapter_bank.prepare(_dummy_adapter(assembly))
    host_adapters[DUMMY_ADAPTER] = adapter
    return parts


def _dummy_adapter(assembly: Assembly) -> HostAdapter:
    """Make an adapter of the largest rank on all modules; its layers share their zeros."""
    spec, settings = assembly.spec, assembly.settings
    targets = layer_targets(spec.module_shapes, settings.rank_limits, spec.num_experts)
    weights = {
        (target.rank, target.in_features, target.out_features): (
            torch.zeros((target.rank, target.in_features), dtype=assembly.dtype),
            torch.zeros((target.out_features, target.rank), dtype=assembly.dtype),
        )
        for target in targets
    }
    return HostAdapter(
        "dummy",
        tuple(
            HostWeight(
                target, *weights[target.rank, target.in_features, target.out_features], scale=1.0
            )
            for target in each_expert(targets)
        ),
    )
