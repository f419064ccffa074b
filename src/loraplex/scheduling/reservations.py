"""Blocks that running sequences will still take: room that nobody else is given."""

from collections.abc import Collection

from loraplex.memory.kv_blocks import KVBlocks
from loraplex.scheduling.active import ActiveRequest, ActiveSequence
from loraplex.scheduling.admission import worst_case_blocks
from loraplex.scheduling.settings import BatchSchedulerPolicy, SchedulerSettings


class BlockReservations:
    """For `guaranteed_no_evict`: who takes a slot finds every block that it can ever need.

    Kept as numbers: the blocks still to be taken by each running sequence
    (`ActiveSequence.num_blocks_to_take`) and by each search of beams as a whole, and their sum.
    Invariant: the sum is at most the blocks that are available. So `grow` never fails, and nothing
    is ever preempted.

    With an attention window a sequence gives blocks back, and takes others, while those that it
    shared stay with their other holders. There the whole worst case stays reserved, and the sum of
    all is at most the number of blocks.
    """

    def __init__(self, kv: KVBlocks, max_step_tokens: int) -> None:
        self._kv = kv
        self._max_step_tokens = max_step_tokens
        self._num_blocks = 0
        self._of_searches: dict[ActiveRequest, int] = {}

    @property
    def num_blocks(self) -> int:
        """Reserved, and not taken yet."""
        return self._num_blocks

    def num_to_leave(self, active: ActiveSequence, num_taken: int) -> int | None:
        """If a sequence (with the other beams of its search) now takes num_taken blocks, how many
        other ones must stay available; None: there is no room whatever is available."""
        worst = self._worst(active.request)
        if not self._kv.has_window:
            return self._num_blocks + max(0, worst - num_taken)
        return 0 if self._num_blocks + worst <= self._kv.num_blocks else None

    def begin(self, active: ActiveSequence) -> None:
        """The sequence has taken its first blocks."""
        if active.request.beams is not None:
            self.changed(active)
            return
        active.num_blocks_to_take = self._still_to_take(active)
        self._num_blocks += active.num_blocks_to_take

    def took(self, active: ActiveSequence, num_blocks: int) -> None:
        """Its block table grew."""
        if active.request.beams is not None:
            self.changed(active)
        elif not self._kv.has_window:
            active.num_blocks_to_take -= num_blocks
            self._num_blocks -= num_blocks
            assert active.num_blocks_to_take >= 0, "more blocks than the worst case"

    def changed(self, beam: ActiveSequence) -> None:
        """The blocks of one beam of a search changed."""
        request = beam.request
        num_blocks = self._still_to_take_by_search(request)
        self._num_blocks += num_blocks - self._of_searches.get(request, 0)
        self._of_searches[request] = num_blocks

    def end(self, active: ActiveSequence) -> None:
        """It gives everything back. Beams end together."""
        self._num_blocks -= active.num_blocks_to_take
        active.num_blocks_to_take = 0
        if active.request.beams is not None:
            self._num_blocks -= self._of_searches.pop(active.request, 0)

    def check(
        self, running: Collection[ActiveSequence], leaving: Collection[ActiveSequence]
    ) -> None:
        """leaving: they still have what they held, and will take no more."""
        num_blocks = sum(active.num_blocks_to_take for active in (*running, *leaving))
        assert self._num_blocks == num_blocks + sum(self._of_searches.values()), "reserved blocks"
        limit = self._kv.num_blocks if self._kv.has_window else self._kv.num_available
        assert self._num_blocks <= limit, "more is reserved than there is"
        for active in running:
            if active.request.beams is None:
                assert active.num_blocks_to_take == self._still_to_take(active), active
        for request, num_of_search in self._of_searches.items():
            assert num_of_search == self._still_to_take_by_search(request), request

    def _still_to_take(self, active: ActiveSequence) -> int:
        num_taken = 0 if self._kv.has_window else len(active.sequence.block_ids)
        return max(0, self._worst(active.request) - num_taken)

    def _still_to_take_by_search(self, request: ActiveRequest) -> int:
        """Beams share blocks: each counts once."""
        tables = [] if self._kv.has_window else [a.sequence.block_ids for a in request.sequences]
        return max(0, self._worst(request) - len({b for table in tables for b in table}))

    def _worst(self, request: ActiveRequest) -> int:
        return worst_case_blocks(
            request.group.request, request.stop_rules, self._kv, self._max_step_tokens
        )


def new_reservations(settings: SchedulerSettings, kv: KVBlocks) -> BlockReservations | None:
    """None for a policy that makes none."""
    if settings.batch_scheduler_policy is not BatchSchedulerPolicy.GUARANTEED_NO_EVICT:
        return None
    return BlockReservations(kv, settings.max_step_tokens)
