"""Blocks that running sequences will still take, and that no other sequence may get."""

from collections.abc import Collection

from loraplex.core.scheduler_settings import BatchSchedulerPolicy, SchedulerSettings
from loraplex.memory.block_tables import BlockCounts
from loraplex.memory.kv_blocks import KVBlocks
from loraplex.scheduling.request import Sequence


class BlockReservations:
    """Reservations for `guaranteed_no_evict`: an admitted sequence gets every block it can need.

    Sequences that are scheduled together have one reservation, kept as
    `Sequence.num_blocks_reserved` of the first of them. Each cache group counts its own blocks.
    Invariant: the sum of all reservations is at most the number of available blocks. So `grow`
    never fails, and nothing is ever preempted.

    In a group with an attention window a sequence frees blocks and takes others, while blocks that
    it shared stay with their other sequences. Then the whole worst case stays reserved, and the sum
    of all reservations is at most the number of blocks.
    """

    def __init__(self, kv: KVBlocks) -> None:
        self._kv = kv
        self._num_blocks = [0] * len(kv.groups)

    def num_to_leave(self, sequence: Sequence, num_taken: BlockCounts) -> BlockCounts | None:
        """Return how many other blocks must stay available if the sequence takes num_taken now.

        The sequences scheduled with it are included. None: it must wait, however many blocks are
        available.
        """
        worst = sequence.request.max_blocks(self._kv)
        num_to_leave = []
        for group, num_reserved, num_worst, count in zip(
            self._kv.groups, self._num_blocks, worst, num_taken, strict=True
        ):
            if not group.frees_early:
                num_to_leave.append(num_reserved + max(0, num_worst - count))
            elif num_reserved + num_worst > group.num_blocks:
                return None
            else:
                num_to_leave.append(0)
        return tuple(num_to_leave)

    def update(self, sequence: Sequence) -> None:
        """Adjust a reservation after a running sequence took, shared or freed blocks."""
        first = sequence.request.scheduled_with(sequence)[0]
        self._reserve(first, self._still_to_take(sequence))

    def end(self, sequence: Sequence) -> None:
        """Drop the reservation of a sequence that frees everything. Beams end together."""
        first = sequence.request.scheduled_with(sequence)[0]
        self._reserve(first, ())

    def check(self, running: Collection[Sequence], leaving: Collection[Sequence]) -> None:
        """Assert the invariants. `leaving` still have their blocks, and will take no more."""
        reserved = [s.num_blocks_reserved for s in (*running, *leaving) if s.num_blocks_reserved]
        for group, num_reserved in zip(self._kv.groups, self._num_blocks, strict=True):
            assert num_reserved == sum(c[group.group_id] for c in reserved), "reserved blocks"
            limit = group.num_blocks if group.frees_early else group.num_available
            assert num_reserved <= limit, "more blocks are reserved than there are"
        for sequence in running:
            if sequence.request.scheduled_with(sequence)[0] is sequence:
                assert sequence.num_blocks_reserved == self._still_to_take(sequence), sequence

    def _reserve(self, first: Sequence, num_blocks: BlockCounts) -> None:
        for cache_group, num_reserved in enumerate(first.num_blocks_reserved):
            self._num_blocks[cache_group] -= num_reserved
        for cache_group, num_reserved in enumerate(num_blocks):
            self._num_blocks[cache_group] += num_reserved
        first.num_blocks_reserved = num_blocks

    def _still_to_take(self, sequence: Sequence) -> BlockCounts:
        request = sequence.request
        worst = request.max_blocks(self._kv)
        return tuple(
            num_worst
            if group.frees_early
            else max(0, num_worst - request.num_blocks_held(sequence, group.group_id))
            for group, num_worst in zip(self._kv.groups, worst, strict=True)
        )


def new_reservations(settings: SchedulerSettings, kv: KVBlocks) -> BlockReservations | None:
    """Return the reservations of the batch scheduler policy; None if it makes none."""
    if settings.batch_scheduler_policy is not BatchSchedulerPolicy.GUARANTEED_NO_EVICT:
        return None
    return BlockReservations(kv)
