"""Blocks that running sequences will still take, and that no other sequence may get."""

from collections.abc import Collection

from loraplex.core.scheduler_settings import BatchSchedulerPolicy, SchedulerSettings
from loraplex.memory.kv_blocks import KVBlocks
from loraplex.scheduling.request import Sequence


class BlockReservations:
    """Reservations for `guaranteed_no_evict`: an admitted sequence gets every block it can need.

    Sequences that are scheduled together have one reservation, kept as
    `Sequence.num_blocks_reserved` of the first of them. Invariant: the sum of all reservations is
    at most the number of available blocks. So `grow` never fails, and nothing is ever preempted.

    With an attention window a sequence frees blocks and takes others, while blocks that it shared
    stay with their other sequences. Then the whole worst case stays reserved, and the sum of all
    reservations is at most the number of blocks.
    """

    def __init__(self, kv: KVBlocks, max_step_tokens: int) -> None:
        self._kv = kv
        self._max_step_tokens = max_step_tokens
        self._num_blocks = 0

    @property
    def num_blocks(self) -> int:
        """Blocks that are reserved and not taken yet."""
        return self._num_blocks

    def num_to_leave(self, sequence: Sequence, num_taken: int) -> int | None:
        """Return how many other blocks must stay available if the sequence takes num_taken now.

        The sequences scheduled with it are included. None: it must wait, however many blocks are
        available.
        """
        worst = sequence.request.max_blocks(self._kv, self._max_step_tokens)
        if not self._kv.has_window:
            return self._num_blocks + max(0, worst - num_taken)
        return 0 if self._num_blocks + worst <= self._kv.num_blocks else None

    def update(self, sequence: Sequence) -> None:
        """Adjust a reservation after a running sequence took, shared or freed blocks."""
        first = sequence.request.scheduled_with(sequence)[0]
        num_blocks = self._still_to_take(sequence)
        self._num_blocks += num_blocks - first.num_blocks_reserved
        first.num_blocks_reserved = num_blocks

    def end(self, sequence: Sequence) -> None:
        """Drop the reservation of a sequence that frees everything. Beams end together."""
        first = sequence.request.scheduled_with(sequence)[0]
        self._num_blocks -= first.num_blocks_reserved
        first.num_blocks_reserved = 0

    def check(self, running: Collection[Sequence], leaving: Collection[Sequence]) -> None:
        """Assert the invariants. `leaving` still have their blocks, and will take no more."""
        num_blocks = sum(sequence.num_blocks_reserved for sequence in (*running, *leaving))
        assert self._num_blocks == num_blocks, "reserved blocks"
        limit = self._kv.num_blocks if self._kv.has_window else self._kv.num_available
        assert self._num_blocks <= limit, "more blocks are reserved than there are"
        for sequence in running:
            if sequence.request.scheduled_with(sequence)[0] is sequence:
                assert sequence.num_blocks_reserved == self._still_to_take(sequence), sequence

    def _still_to_take(self, sequence: Sequence) -> int:
        request = sequence.request
        num_taken = 0 if self._kv.has_window else request.num_blocks_held(sequence)
        return max(0, request.max_blocks(self._kv, self._max_step_tokens) - num_taken)


def new_reservations(settings: SchedulerSettings, kv: KVBlocks) -> BlockReservations | None:
    """Return the reservations of the batch scheduler policy; None if it makes none."""
    if settings.batch_scheduler_policy is not BatchSchedulerPolicy.GUARANTEED_NO_EVICT:
        return None
    return BlockReservations(kv, settings.max_step_tokens)
