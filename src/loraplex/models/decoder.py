"""The whole decoder: token ids in, logits out. All that a step needs is an argument."""

from collections.abc import Callable, Mapping, Sequence

import torch

from loraplex.core.adapter import LM_HEAD, OUTSIDE_LAYERS
from loraplex.kernels.adapter_parts import add_vectors, replace_logits, scores
from loraplex.kernels.channel import Channel
from loraplex.kernels.host_tensors import tiled_product
from loraplex.kernels.lora import batch_of_rows, head_place
from loraplex.kernels.ops import Kernels
from loraplex.models.base_linears import BaseLinears, base_linears
from loraplex.models.batch import ForwardBatch
from loraplex.models.cache_groups import LayerGroup
from loraplex.models.embedding import Embedding
from loraplex.models.feed_forward import feed_forward
from loraplex.models.layer_input import LayerInput, LayerInputs
from loraplex.models.mixers.kinds import make_mixer
from loraplex.models.mixers.mixer import (
    Angles,
    EncoderReader,
    LayerPlace,
    Mixer,
    MixerInputs,
    Part,
    PlanKind,
    Storages,
)
from loraplex.models.norm import HiddenState, NoNorm, Norm, make_norm
from loraplex.models.parameters import OUTPUT_FACTOR, DecoderParameters, LayerParameters
from loraplex.models.rope import RotaryTable
from loraplex.models.spec import LAYER_INPUTS, LayerSpec, ModelSpec, NormPlace
from loraplex.models.specs.part import MixerSpec, RopeConfig

_MAX_REPEATED_TOKENS = 512
"""Maximum of a repeated step: in larger ones the calls of the ops cost little compared with what
they compute."""


class DecoderLayer:
    """One layer of a decoder: how its parts and norms follow one another."""

    def __init__(
        self, spec: LayerSpec, place: LayerPlace, parameters: LayerParameters, kernels: Kernels
    ) -> None:
        self._factor = spec.residual_factor
        self._kernels = kernels

        def mixer(kind: MixerSpec | None) -> Mixer | None:
            return None if kind is None else make_mixer(kind, place, parameters, kernels)

        def norm(where: NormPlace | None) -> Norm:
            if where is None:
                return NoNorm(kernels)
            return make_norm(spec.norms.get(where), parameters.norms.get(where), kernels)

        mixers = (mixer(spec.mixer), mixer(spec.cross))
        inner = own_input = None
        if spec.feed_forward is not None:
            inner = feed_forward(spec.feed_forward, place, parameters, kernels, norm)
        if spec.layer_input is not None:
            own_input = LayerInput(spec.layer_input, place, parameters, kernels)
        parts: tuple[tuple[NormPlace | None, Part | None, NormPlace], ...] = (
            (NormPlace.BEFORE_MIXER, mixers[0], NormPlace.AFTER_MIXER),
            (NormPlace.BEFORE_CROSS, mixers[1], NormPlace.AFTER_CROSS),
            (NormPlace.BEFORE_FEED_FORWARD, inner, NormPlace.AFTER_FEED_FORWARD),
            (None, own_input, NormPlace.AFTER_LAYER_INPUT),
        )
        self._parts = [
            (norm(before), part, norm(after)) for before, part, after in parts if part is not None
        ]
        """The parts that there are, with the norms before and after each."""
        self.plan_kinds = [kind for each in mixers if each is not None for kind in each.plan_kinds]
        """Mixer.plan_kinds of its mixers."""
        self.encoder_readers = _encoder_readers(mixers)
        """Its mixers that read an encoder's output."""
        self._has_second_norm = NormPlace.BEFORE_FEED_FORWARD in spec.norms
        is_parallel = spec.is_parallel and len(self._parts) > 1
        self._output_factor = 1.0
        self.forward = self._both_at_once if is_parallel else self._one_by_one
        """(state, inputs) -> the state that the next layer reads."""
        if spec.output_factor:
            assert not is_parallel, "no family has both"
            self._output_factor = parameters.tensors[OUTPUT_FACTOR].item()
            self.forward = self._multiplied

    def _one_by_one(self, state: HiddenState, inputs: MixerInputs) -> HiddenState:
        lora = inputs.batch.lora
        for before, part, after in self._parts:
            x, residual = before.read(state)
            x = after.apply(part.forward(x, lora, inputs))
            state = HiddenState(residual, x, self._factor)
        return state

    def _multiplied(self, state: HiddenState, inputs: MixerInputs) -> HiddenState:
        total, _ = NoNorm(self._kernels).read(self._one_by_one(state, inputs))
        self._kernels.scale(total, self._output_factor)
        return HiddenState(total, None)

    def _both_at_once(self, state: HiddenState, inputs: MixerInputs) -> HiddenState:
        lora = inputs.batch.lora
        (first_norm, mixer, _), (second_norm, inner, _) = self._parts
        x, residual = first_norm.read(state)
        mixed = mixer.forward(x, lora, inputs)
        if self._has_second_norm:
            x = second_norm.apply(residual)
        x = inner.forward(x, lora, inputs)
        return HiddenState(residual, self._kernels.add(x, mixed), self._factor)


def _encoder_readers(parts: Sequence[object]) -> list[EncoderReader]:
    return [part for part in parts if isinstance(part, EncoderReader)]


def decoder_embedding(
    spec: ModelSpec, parameters: DecoderParameters, kernels: Kernels
) -> Embedding:
    """Return the embedding of a decoder; parameters: packed by these kernels."""
    return Embedding(
        kernels,
        parameters.embedding,
        parameters.packed_embedding,
        factor=embedding_factor(spec, parameters.embedding.dtype),
        projection=parameters.projections[0] if parameters.projections else None,
        norm=make_norm(spec.embedding_norm, parameters.embedding_norm, kernels),
        positions=parameters.positions,
        is_norm_last=spec.is_embedding_norm_last,
    )


def embedding_factor(spec: ModelSpec, dtype: torch.dtype) -> float:
    """Return the factor of the token embedding of a model that computes in this type."""
    factor = torch.tensor(spec.embedding_factor, dtype=torch.float64)
    rounded: float = (factor.to(dtype) if spec.rounds_embedding_factor else factor).item()
    return rounded


class Decoder:
    """One base model on one device."""

    def __init__(
        self,
        spec: ModelSpec,
        parameters: DecoderParameters,
        rotary: Mapping[RopeConfig, RotaryTable],
        kernels: Kernels,
        *,
        cache_groups: Sequence[LayerGroup],
        block_size: int,
        loads: Channel | None = None,
    ) -> None:
        """parameters: packed by these kernels. rotary: a table for each RopeConfig of the layers.

        cache_groups: in the order of what `forward` will get; block_size: of its KV storage. loads:
        channel of the thread that loads adapters; None: this is the only rank.
        """
        self.spec = spec
        self._kernels = kernels
        self._rotary = rotary
        self._projections = parameters.projections
        self._embedding = decoder_embedding(spec, parameters, kernels)
        self._dtype = parameters.embedding.dtype
        group_of = {cache: n for n, group in enumerate(cache_groups) for cache in group.caches}
        self._layers = []
        self._layer_inputs: LayerInputs | None = None
        planners: dict[PlanKind, Callable[[ForwardBatch], object]] = {}
        device = parameters.embedding.device
        for index, (layer, packed) in enumerate(zip(spec.layers, parameters.layers, strict=True)):
            place = LayerPlace(index, layer.linears, group_of, block_size)
            made = DecoderLayer(layer, place, packed, kernels)
            self._layers.append(made)
            if LAYER_INPUTS in layer.linears and parameters.layer_inputs is not None:
                projection = place.linear(LAYER_INPUTS, packed, kernels)
                self._layer_inputs = LayerInputs(spec, parameters.layer_inputs, projection, kernels)
            for kind in made.plan_kinds:
                if kind not in planners:
                    planners[kind] = kind.planner(kernels, device)
        self._planners = planners
        self._final_norm = make_norm(spec.final_norm, parameters.final_norm, kernels)
        if not spec.is_last_stage:
            self._final_norm = NoNorm(kernels)
        self._lm_head = parameters.lm_head
        self._score = parameters.score
        self.base_linears: BaseLinears = base_linears(spec, parameters, kernels, loads)
        """The linear layers as adapters see them."""

    @property
    def dtype(self) -> torch.dtype:
        """Type of its activations."""
        return self._dtype

    def forward(
        self,
        batch: ForwardBatch,
        kv: Storages,
        hidden: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute the logits [S, vocab_size] of batch.logits_indices, in the model's dtype.

        They are valid until the next call. In a stage that is not the
        last, the result is the hidden state [T, hidden] instead. hidden: that of the stage before,
        which may be overwritten; None: this is the first stage.
        """
        if not (self.spec.has_lm_head and _is_repeatable(batch)):
            state = self.hidden_states(batch, kv, hidden)
            return self.logits(state, batch) if self.spec.is_last_stage else state
        plans = self._plan(batch)
        num_tokens = batch.token_ids.shape[0]
        wants_all = batch.logits_indices.shape[0] == num_tokens
        # A record holds addresses of these weights and this KV storage, so they must live as long
        # as it, and the number of launches that follows from the numbers of tokens, LoRA waves and
        # device rows, and from whether adapters change outputs in addition to LoRA. All are in the
        # key, as objects: the number of one that is gone could be another one's.
        result = self._kernels.repeat(
            (
                *(self, kv, num_tokens, wants_all),
                batch.lora and (batch.lora.num_waves, bool(batch.lora.parts)),
                batch.rows[0].num_device_rows,
            ),
            (
                *(batch.token_ids, batch.positions, *batch.slot_mappings),
                *(batch.lora, *plans.values()),
                *(() if hidden is None else (hidden,)),
            ),
            lambda: self._decoded(self._hidden(batch, kv, plans, hidden), wants_all),
        )
        is_end = wants_all or not self.spec.is_last_stage
        return result if is_end else self.logits(result, batch)

    def hidden_states(
        self,
        batch: ForwardBatch,
        kv: Storages,
        hidden: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute the output of the final norm [T, hidden], without a record; else as `forward`."""
        return self._hidden(batch, kv, self._plan(batch), hidden)

    def encode(self, x: torch.Tensor, batch: ForwardBatch, kv: Storages) -> None:
        """Write what the layers keep of an encoder's output x [T, size].

        batch: positions of one input, and their places in the storages. All adapters of its LoRA
        have arrived.
        """
        inputs = MixerInputs(batch, kv, {}, {})
        for layer in self._layers:
            for reader in layer.encoder_readers:
                reader.encode(x, batch.lora, inputs)

    def read_rows(self, x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        """Return what the output layer reads [S, size] of these tokens of `hidden_states`."""
        return self._projected_back(self._kernels.take_rows(x, indices))

    def _plan(self, batch: ForwardBatch) -> dict[PlanKind, object]:
        return {kind: plan(batch) for kind, plan in self._planners.items()}

    def _hidden(
        self,
        batch: ForwardBatch,
        kv: Storages,
        plans: Mapping[PlanKind, object],
        hidden: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the output of the final norm [T, hidden]; before the last stage, what it gets."""
        state = self._embedding.state(batch) if hidden is None else HiddenState(hidden, None)
        own_inputs = None
        if self._layer_inputs is not None:
            _wait_for(0, batch)  # whose LoRA the projection's is
            own_inputs = self._layer_inputs.of_tokens(state.residual, batch.token_ids, batch.lora)
        inputs = MixerInputs(batch, kv, self._angles(batch), plans, own_inputs)
        for index, layer in enumerate(self._layers):
            _wait_for(index, batch)
            state = layer.forward(state, inputs)
        normed, _ = self._final_norm.read(state)
        return normed

    def _decoded(self, x: torch.Tensor, wants_all: bool) -> torch.Tensor:
        """x [T, hidden]: result of `_hidden`. wants_all: the step wants every token's logits."""
        if not (wants_all and self.spec.is_last_stage):
            return x
        return self._scaled(self._base_logits(self._projected_back(x)))

    def _angles(self, batch: ForwardBatch) -> dict[RopeConfig, Angles]:
        take = self._kernels.take_rows
        angles: dict[RopeConfig, Angles] = {}
        for rope, table in self._rotary.items():
            cos, sin = take(table.cos, batch.positions), take(table.sin, batch.positions)
            for span in batch.rotated_spans:
                table.rotate_span(cos, sin, span)
            angles[rope] = cos, sin
        return angles

    def logits(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """Compute the logits [S, vocab_size] of x [T, hidden], the result of `hidden_states`."""
        indices, lora = batch.logits_indices, batch.lora
        # The lm_head is the largest product: only tokens that are sampled need it.
        x = self.read_rows(x, indices)
        logits = self._base_logits(x)
        if lora is not None and lora.changes_ends:
            lora = batch_of_rows(lora, indices, batch.token_ids.shape[0])
            replace_logits(logits, x, lora.parts)
            add_vectors(logits, lora.parts, OUTSIDE_LAYERS, (LM_HEAD,), (0,))
            if lora.head_table is not None:
                self._kernels.add_lora(logits, x, lora, head_place(lora.head_table))
        return self._scaled(logits)

    def scores(
        self, x: torch.Tensor, indices: torch.Tensor, batch: ForwardBatch
    ) -> list[torch.Tensor]:
        """Compute what classification heads give for tokens indices [S], in ascending order.

        x [T, hidden]: the result of `hidden_states`. Returns float32 [labels] for each token, of
        the head of its adapter, else of the model's own; without labels where neither has one.
        """
        rows, lora = self.read_rows(x, indices).float(), batch.lora
        base = rows.new_zeros((len(rows), 0))
        if self._score is not None:
            base = tiled_product(rows, self._score.t())
        if lora is None or not lora.parts:
            return list(base)
        return scores(base, rows, batch_of_rows(lora, indices, len(x)).parts)

    def _base_logits(self, x: torch.Tensor) -> torch.Tensor:
        """Compute x [S, size] -> [S, vocab_size]; ranks compute a share each and give it to all.

        Without an output layer they are zeros, of which only trials have a row.
        """
        if self._lm_head is None:
            return x.new_zeros((x.shape[0], self.spec.vocab_size))
        logits = self._kernels.linear(x, self._lm_head)
        if self.spec.own_logits is None:
            return logits
        return self._kernels.gather_columns(logits, self.spec.vocab_size)

    def _projected_back(self, x: torch.Tensor) -> torch.Tensor:
        """x [S, hidden] -> what the output layer reads."""
        return self._kernels.linear(x, self._projections[1]) if self._projections else x

    def _scaled(self, logits: torch.Tensor) -> torch.Tensor:
        """Apply, in place, what the model does to its logits [S, vocab_size]."""
        factor, soft_cap = self.spec.logits_factor, self.spec.logits_soft_cap
        if factor != 1.0 or soft_cap is not None:
            self._kernels.scale(logits, factor, soft_cap)
        return logits


def _is_repeatable(batch: ForwardBatch) -> bool:
    """Whether the step is a small one, and the next one of its size is like it.

    With prompts among them, recurrent layers depend on the number of rows, and a device has no
    records.
    """
    num_tokens = batch.token_ids.shape[0]
    has_prompts = batch.logits_indices.shape[0] < num_tokens
    if (
        batch.rotated_spans
        or batch.encoded
        or num_tokens > _MAX_REPEATED_TOKENS
        or (has_prompts and (batch.state_rows or batch.rows[0].on_device))
    ):
        return False
    return batch.lora is None or not (batch.lora.changes_ends or batch.lora.arrivals)


def _wait_for(layer: int, batch: ForwardBatch) -> None:
    """Let the device wait for the layer's matrices of adapters that are still being copied."""
    if batch.lora is not None and batch.lora.arrivals is not None:
        batch.lora.arrivals.wait_for(layer)
