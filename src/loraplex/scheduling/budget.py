"""How many tokens one plan may still compute."""


class StepBudget:
    """The token budget of one plan."""

    def __init__(self, max_num_batched_tokens: int, max_prefill_chunk: int | None = None) -> None:
        self._num_left = max_num_batched_tokens
        self._max_per_row = max_prefill_chunk or max_num_batched_tokens

    @property
    def num_left(self) -> int:
        return self._num_left

    @property
    def max_per_row(self) -> int:
        """Tokens that one row computes at most."""
        return self._max_per_row

    def spend(self, num_tokens: int) -> None:
        assert 0 < num_tokens <= self._num_left
        self._num_left -= num_tokens
