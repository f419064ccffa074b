"""Mixer with a recurrence that only tests have: its state is an exact hash of all inputs so far.

The hashes are integers below 2 ** 24, so float32 holds each exactly. What a model writes with such
layers depends on every token before.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Collection, Iterator
from typing import Final

import pytest
import torch

from loraplex.core.cache import CachedFloats, Chunk, States
from loraplex.kernels.lora import LoraBatch
from loraplex.kernels.ops import Kernels, Storage
from loraplex.kernels.states import StatePlan
from loraplex.models.mixers import kinds
from loraplex.models.mixers.mixer import LayerPlace, MixerInputs
from loraplex.models.mixers.state_plan import StateKind
from loraplex.models.parameters import LayerParameters
from loraplex.models.spec import LayerSpec, ModelSpec, NormPlace
from loraplex.models.specs.part import (
    LayerCache,
    MixerSpec,
)
from support.toy_mixer import WholeSpec

MODULUS: Final = 2**24 - 3
FACTOR: Final = 48_271
NUM_ROWS: Final = 64
"""Rows of the table that a hash chooses from."""


@dataclasses.dataclass(frozen=True, slots=True)
class RecurrenceSpec(WholeSpec):
    """A row of a table by the hash of the inputs up to each position."""

    hidden: int
    every: int
    """Positions between states."""
    seed: int  # of the table

    def caches(self) -> tuple[LayerCache, LayerCache]:
        """Return the numbers of the positions since the last state, and the states."""
        return (
            LayerCache(Chunk(self.every), (CachedFloats((1,), is_per_position=True),)),
            LayerCache(States(self.every), (CachedFloats((1,)),)),
        )

    def step_bytes(self, itemsize: int) -> int:
        return self.hidden * itemsize


class Recurrence:
    """Implements `Mixer`.

    hash(i) = FACTOR * hash(i - 1) + number(i), from the state at the last multiple of `every` on,
    whatever step computes position i.
    """

    def __init__(
        self,
        spec: RecurrenceSpec,
        place: LayerPlace,
        _parameters: LayerParameters,
        _kernels: Kernels,
    ) -> None:
        chunk, states = spec.caches()
        self._every = spec.every
        self._block_size = place.block_size
        self._layer = place.layer
        self._kind = StateKind(place.cache_groups[states], place.cache_groups[chunk])
        self.plan_kinds = (self._kind,)
        generator = torch.Generator().manual_seed(spec.seed)
        self._table = torch.randn((NUM_ROWS, spec.hidden), generator=generator)
        self._weights = torch.randint(1, 2**16, (spec.hidden,), generator=generator)

    def forward(self, x: torch.Tensor, lora: LoraBatch | None, inputs: MixerInputs) -> torch.Tensor:
        del lora
        plan = inputs.plans[self._kind]
        assert isinstance(plan, StatePlan)
        numbers, states = (
            self._stored(inputs.storages[group][self._layer])
            for group in (self._kind.chunk, self._kind.states)
        )
        is_kept = plan.places >= 0
        # The flat view [positions, 1] of the blocks.
        numbers[plan.places[is_kept]] = self._numbers(x)[is_kept]
        hashes = self._hashes(plan, numbers, states)
        self.write(states, plan, hashes)
        return self._table[hashes % NUM_ROWS]

    def read(self, states: torch.Tensor, plan: StatePlan, row: int) -> int:
        """Return the state that a row begins with."""
        state = int(plan.reads[row])
        return 0 if state < 0 else int(states[state])

    def write(self, states: torch.Tensor, plan: StatePlan, hashes: torch.Tensor) -> None:
        """Write the hashes [T] of the tokens that end a state; padding has the hash 0."""
        is_written = plan.writes >= 0
        states[plan.writes[is_written]] = hashes[is_written].float()

    def _stored(self, storage: Storage | None) -> torch.Tensor:
        """Return the numbers of a storage: of each position, or of each block."""
        assert storage is not None
        (tensor,) = storage.tensors
        return tensor.view(-1)

    def _numbers(self, x: torch.Tensor) -> torch.Tensor:
        """Return a number [T] float32 for the bits of each row of x [T, hidden] float32."""
        assert x.dtype == torch.float32
        bits = x.contiguous().view(torch.int32).long()
        return ((bits * self._weights).sum(1) % MODULUS).float()

    def _hashes(self, plan: StatePlan, numbers: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Return the hash [T] int64 up to each token. Reads all states before any is written."""
        hashes = torch.zeros(len(plan.positions), dtype=torch.int64)
        for row, (first, end) in enumerate(itertools.pairwise(plan.query_start_loc.tolist())):
            if first == end:
                continue
            start = int(plan.positions[first])
            border = start // self._every * self._every
            since = torch.arange(border, start + end - first)
            entries = int(plan.table_starts[row]) + since // self._block_size
            places = plan.tables[entries].long() * self._block_size + since % self._block_size
            found, state = [], self.read(states, plan, row)
            for number in numbers[places].long().tolist():
                state = (state * FACTOR + number) % MODULUS
                found.append(state)
            hashes[first:end] = torch.tensor(found[start - border :])
        return hashes


def with_recurrence(spec: ModelSpec, layers: Collection[int], every: int) -> ModelSpec:
    """Return the model with a recurrence in the place of the mixer of these layers."""
    return dataclasses.replace(
        spec,
        layers=tuple(
            _recurrent(layer, every, index) if index in layers else layer
            for index, layer in enumerate(spec.layers)
        ),
    )


def _recurrent(layer: LayerSpec, every: int, seed: int) -> LayerSpec:
    hidden = layer.norms[NormPlace.BEFORE_MIXER].size
    linears = {name: group for name, group in layer.linears.items() if name not in ("qkv", "o")}
    return dataclasses.replace(layer, mixer=RecurrenceSpec(hidden, every, seed), linears=linears)


@contextlib.contextmanager
def known_recurrence() -> Iterator[None]:
    """Return the block in which decoders may have such layers."""
    mixers: dict[type[MixerSpec], kinds.MixerClass] = {**kinds.MIXERS, RecurrenceSpec: Recurrence}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kinds, "MIXERS", mixers)
        yield
