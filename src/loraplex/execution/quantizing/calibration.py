"""Inputs of a model's linear layers, from texts that it computes layer by layer.

A layer reads what the quantised layers before it give. One layer is in memory at a time, as
float32, and the hidden states of all texts.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from loraplex.core.errors import UnsupportedModelError
from loraplex.core.plan import NO_BLOCK, CacheGroupCapacity, RowAdded, RowStep
from loraplex.core.sampling_params import SamplingParams
from loraplex.core.task import Generate
from loraplex.execution.steps.input_batch import InputBatch, states_of
from loraplex.execution.steps.kv_cache import KVCache
from loraplex.execution.steps.tensors import HostTensors
from loraplex.execution.weights.packing import WeightFormat, pack_checkpoint
from loraplex.kernels.ops import PackedLinear, Storage
from loraplex.kernels.reference import ReferenceKernels
from loraplex.kernels.routing import Routes
from loraplex.memory.cache_policy import cache_policy
from loraplex.models.cache_groups import cache_groups
from loraplex.models.decoder import Decoder
from loraplex.models.parameters import DecoderParameters
from loraplex.models.rope import rotary_tables
from loraplex.models.spec import ModelSpec
from loraplex.models.stages import layer_alone

_BLOCK_SIZE = 16
_FORM = WeightFormat(dtype=torch.float32)


class CalibrationInputs:
    """Implements `Inputs`. The experts of a layer share the inputs of all of them."""

    def __init__(self, source: Path, spec: ModelSpec, texts: Sequence[Sequence[int]]) -> None:
        """texts: token ids, none empty, none longer than spec.default_max_model_len.

        Raises UnsupportedModelError for layers that read more than the hidden state.
        """
        shares_kv = any(mixer.kv_distance for layer in spec.layers for mixer in layer.mixers)
        if shares_kv or spec.layer_input_size:
            raise UnsupportedModelError(
                f"layers of {spec.architecture} read keys of other layers, or vectors made of the "
                "token embedding, and calibration computes one layer at a time: quantize without "
                "--calibrate"
            )
        self._source = source
        self._spec = spec
        self._texts = texts
        self._hidden: list[torch.Tensor | None] = [None for _ in texts]
        self._layer: _Layer | None = None

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self._texts))

    def moments(self, layer: int) -> Mapping[str, torch.Tensor]:
        self._layer = _Layer(
            self._source, layer_alone(self._spec, layer), max(map(len, self._texts))
        )
        for text, hidden in zip(self._texts, self._hidden, strict=True):
            self._layer.run(text, hidden)
        return self._layer.kernels.moments

    def proceed(self, layer: int, weights: Mapping[str, torch.Tensor]) -> None:
        computed, self._layer = self._layer, None
        if computed is None or layer == self._spec.num_layers - 1:
            return
        computed.replace(weights)
        self._hidden = [
            computed.run(text, hidden)
            for text, hidden in zip(self._texts, self._hidden, strict=True)
        ]


class _Layer:
    """Decoder of one layer, with the embedding if it is the first."""

    def __init__(self, source: Path, spec: ModelSpec, max_len: int) -> None:
        self.kernels = _ObservingKernels(torch.device("cpu"))
        self._spec = spec
        self._parameters: DecoderParameters = pack_checkpoint(
            source, spec, self.kernels, _FORM, shows_progress=False
        ).parameters
        num_blocks = -(-max_len // _BLOCK_SIZE)
        groups = cache_groups(spec, max_len)
        self._policies = [cache_policy(group.spec, _BLOCK_SIZE) for group in groups]
        states = states_of([group.spec for group in groups])
        self._batch = InputBatch(1, max_len, _BLOCK_SIZE, len(groups), states=states)
        self._tensors = HostTensors(torch.device("cpu"))
        self._storages = KVCache(
            groups,
            [CacheGroupCapacity(num_blocks=num_blocks)] * len(groups),
            spec.num_layers,
            _BLOCK_SIZE,
            torch.float32,
            self.kernels,
            device=torch.device("cpu"),
        ).storages
        self._decoder = Decoder(
            spec,
            self._parameters,
            rotary_tables(spec, max_len, torch.device("cpu")),
            self.kernels,
            cache_groups=groups,
            block_size=_BLOCK_SIZE,
        )
        (layer,), (packed,) = spec.layers, self._parameters.layers
        self.kernels.watch(
            packed.linears,
            *(name for name, group in layer.linears.items() if group.is_taken_apart),
        )

    def run(self, text: Sequence[int], hidden: torch.Tensor | None) -> torch.Tensor:
        """Return the hidden states [T, hidden] after the layer; logits after the last one."""
        num_tokens = len(text)
        # Each text is computed in one step, so no states are kept.
        blocks = (
            tuple(NO_BLOCK if policy.is_sparse else n for n in policy.takes(0, num_tokens))
            for policy in self._policies
        )
        step = RowStep(0, 0, num_tokens, token_ids=tuple(text), new_block_ids=tuple(blocks))
        self._batch.add_row(RowAdded(0, 0, Generate(SamplingParams()), 0, (), 0))
        batch = self._tensors.batch(self._batch.prepare([step]), [text], None)
        self._batch.remove_row(0)
        # A stage may overwrite what it is given.
        given = None if hidden is None else hidden.clone()
        return self._decoder.forward(batch, self._storages, given).clone()

    def replace(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Put weights [out, in] by full name in the place of the checkpoint's; observe no more."""
        self.kernels.watch({})
        (layer,), (packed,) = self._spec.layers, self._parameters.layers
        for name, group in layer.linears.items():
            (whole, _) = self.kernels.linear_parts(packed.linears[name]).tensors
            assert whole is not None
            # The rows of experts, and of the parts of each, follow one another.
            rows = whole.flatten(0, -2)
            sizes = list(group.outputs.values())
            names = (
                f"{path.format(expert=expert)}.weight"
                for expert in range(group.num_experts or 1)
                for path in group.paths
            )
            for part, weight in zip(
                torch.split(rows, sizes * (group.num_experts or 1)), names, strict=True
            ):
                if weight in weights:
                    part.copy_(weights[weight])


class _ObservingKernels(ReferenceKernels):
    """Adds up X^T X of the inputs X of the linear layers that it watches."""

    def watch(self, linears: Mapping[str, PackedLinear], of_latents: str | None = None) -> None:
        """linears: by the name of their group; they must outlive the watching.

        of_latents: the one that reads latent vectors, which absorption multiplies with no product.
        """
        self._names = {id(packed): name for name, packed in linears.items()}
        self._of_latents = of_latents
        self.moments: dict[str, torch.Tensor] = {}

    def linear(self, x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
        self._note(x, packed)
        return super().linear(x, packed)

    def grouped_linear(self, x: torch.Tensor, packed: PackedLinear, routes: Routes) -> torch.Tensor:
        self._note(x, packed)
        return super().grouped_linear(x, packed, routes)

    def write_latent(
        self,
        storage: Storage,
        latent: torch.Tensor,
        key: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        if self._of_latents is not None:
            self._add(self._of_latents, latent)
        super().write_latent(storage, latent, key, slot_mapping)

    def _note(self, x: torch.Tensor, packed: PackedLinear) -> None:
        name = self._names.get(id(packed))
        if name is not None:
            self._add(name, x)

    def _add(self, name: str, x: torch.Tensor) -> None:
        known = self.moments.setdefault(name, torch.zeros(x.shape[1], x.shape[1]))
        known.addmm_(x.t(), x)
