"""A request for a vector of its prompt: it ends when its last position is computed."""

import dataclasses

import msgspec

from loraplex.core.errors import (
    InvalidParameterError,
    LoraplexError,
    PromptTooLongError,
    TokenOutOfVocabularyError,
    UnsupportedFeatureError,
)
from loraplex.core.plan import RowResult, RowStep, Wanted
from loraplex.core.task import Pool, Task
from loraplex.memory.block_tables import BlockCounts
from loraplex.memory.kv_blocks import KVBlocks
from loraplex.scheduling.request import EngineLimits, Request, Sequence, StopRules


@dataclasses.dataclass(slots=True, eq=False)
class PoolRequest(Request):
    """A request with one sequence, which gains no token."""

    stop_rules: StopRules = dataclasses.field(init=False, repr=False)
    """Unset: they are about new tokens."""

    @property
    def pool(self) -> Pool:
        task = self.engine_request.task
        assert isinstance(task, Pool), f"{task} is no vector"
        return task

    @property
    def num_logprobs(self) -> int | None:
        return None

    def row_task(self, sequence: Sequence) -> Task:  # noqa: ARG002
        return self.pool

    def refusal(self, limits: EngineLimits) -> LoraplexError | None:
        capacity, kv, settings, _ = limits
        if self.num_encoder_tokens or capacity.longest_encoder_input:
            refusal = self.encoder_refusal(capacity, settings)
            if refusal is not None:
                return refusal
        num_tokens, pool = len(self.engine_request.prompt_token_ids), self.pool
        if pool.kind not in capacity.pool_kinds:
            served = ", ".join(capacity.pool_kinds) or "none"
            return UnsupportedFeatureError(
                f"vectors of kind {pool.kind} are not served; kinds of this model: {served}",
                param="kind",
            )
        strange = [each for each in pool.token_ids if not 0 <= each < capacity.vocab_size]
        if strange:
            return TokenOutOfVocabularyError(
                f"token_ids: token id {strange[0]} is out of the vocabulary of this model, which "
                f"is 0 to {capacity.vocab_size - 1}",
                param="token_ids",
            )
        if pool.dimensions is not None and pool.dimensions > capacity.hidden_size:
            return InvalidParameterError(
                f"dimensions must be at most {capacity.hidden_size}, the length of this model's "
                f"vectors, got {pool.dimensions}",
                param="dimensions",
            )
        if num_tokens > capacity.max_model_len:
            return PromptTooLongError(
                f"the prompt has {num_tokens} tokens; the model's length is "
                f"{capacity.max_model_len} tokens"
            )
        shortage = kv.shortage(self.max_blocks(kv))
        if shortage is not None:
            return PromptTooLongError(
                f"{self._encoder_input}{num_tokens} prompt tokens need {shortage}"
            )
        if self.images or self.whole_spans:
            return self.input_refusal(capacity, settings)
        return None

    def max_blocks(self, kv: KVBlocks) -> BlockCounts:
        num_tokens = len(self.engine_request.prompt_token_ids)
        return kv.max_blocks_held(num_tokens, self.max_step_tokens, self.num_encoder_tokens)

    def can_project(self, sequence: Sequence, row: RowStep) -> bool:
        """Return whether something follows: after the last position there is no next input."""
        return row.start + row.num_tokens < sequence.num_tokens

    def complete_row(self, sequence: Sequence, row: RowStep) -> RowStep:  # noqa: ARG002
        if row.wanted is not Wanted.LAST:
            return row
        return msgspec.structs.replace(row, wanted=Wanted.POOL)

    def has_sample(self, result: RowResult) -> bool:
        """Return whether the result of the last position is a vector, and nothing else."""
        return bool(result.pooled) and not result.token_ids
