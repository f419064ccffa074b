"""What a request wants of the model: generated tokens, or a vector of its prompt."""

import enum
from types import MappingProxyType
from typing import Final, Self

import msgspec

from loraplex.core.errors import InvalidParameterError
from loraplex.core.sampling_params import SamplingParams

MAX_DIMENSIONS = 2**31 - 1
MAX_SCORED_TOKENS = 1024
"""Maximum number of tokens whose logits one request returns."""


class Generate(msgspec.Struct, frozen=True, omit_defaults=True, tag="generate"):
    """Generate tokens after the prompt."""

    sampling: SamplingParams = SamplingParams()
    seed: int = 0
    """Seed of the draws of one sequence. Set in a plan; a request has it in `sampling`."""
    suppressed_token_ids: tuple[int, ...] = ()
    """End and stop tokens, which must not be sampled before min_tokens. Set in a plan."""
    end_token_ids: tuple[int, ...] = ()
    """End tokens that may come where the grammar may end. Set in a plan."""

    @property
    def name(self) -> str:
        """Name of the task in logs and metrics."""
        return "generate"

    @property
    def num_sequences(self) -> int:
        """Number of sequences that are computed."""
        return self.sampling.num_sequences

    @property
    def max_new_tokens(self) -> int:
        """Maximum number of new tokens of an admitted request, over all sequences."""
        assert self.sampling.max_tokens is not None, "set by admission"
        return self.sampling.num_sequences * self.sampling.max_tokens

    @property
    def num_returned(self) -> int:
        """Number of sequences that the engine outputs: for beam search the n hypotheses."""
        sampling = self.sampling
        return sampling.n if sampling.beam is not None else sampling.num_sequences

    @property
    def is_search(self) -> bool:
        """Whether the output comes whole, at the end of a beam search."""
        return self.sampling.beam is not None


class PoolKind(enum.StrEnum):
    """What of a prompt becomes its vector: hidden states of positions, or scores of the last."""

    LAST = "last"
    """The hidden state of the last token."""
    MEAN = "mean"
    """The mean of the hidden states of all tokens."""
    WEIGHTED_MEAN = "weighted_mean"
    """The mean with the weights 1, 2, ..."""
    CLS = "cls"
    """The hidden state of the first token."""
    SCORE = "score"
    """What a classification head gives for the last token: one logit for each label."""
    LOGITS = "logits"
    """Logits of `Pool.token_ids` after the last token, by the output layer."""

    @property
    def needs_whole_prompt(self) -> bool:
        """Whether a step must compute all positions: what it yields is not the last one's alone."""
        return self in (PoolKind.MEAN, PoolKind.WEIGHTED_MEAN, PoolKind.CLS)

    @property
    def is_scores(self) -> bool:
        """Whether the values are scores, of labels or tokens, and no hidden state."""
        return self in (PoolKind.SCORE, PoolKind.LOGITS)


_POOL_NAMES: Final = MappingProxyType({PoolKind.SCORE: "classify", PoolKind.LOGITS: "score"})
"""Pool.name by kind, of those that are no hidden states."""


class PoolActivation(enum.StrEnum):
    """Function of the values of a vector."""

    NONE = "none"
    SIGMOID = "sigmoid"
    SOFTMAX = "softmax"
    """A single value becomes its sigmoid, which is the softmax of it and 0."""


class Pool(msgspec.Struct, frozen=True, omit_defaults=True, tag="pool"):
    """Return one vector of the prompt. The steps are done in the order of the fields."""

    kind: PoolKind = PoolKind.LAST
    dimensions: int | None = None
    """Number of first values to keep; None: all."""
    activation: PoolActivation = PoolActivation.NONE
    normalize: bool = True
    """Divide the vector by its length."""
    token_ids: tuple[int, ...] = ()
    """Tokens of LOGITS; the values have their order."""
    is_logprobs: bool = False
    """Whether the values of LOGITS are log probabilities among all tokens of the model."""
    num_left_out: int = 0
    """First tokens of the prompt that means and CLS leave out. Set by admission."""

    @property
    def name(self) -> str:
        """Name of the task in logs and metrics: that of the kind's route."""
        return _POOL_NAMES.get(self.kind, "embed")

    @property
    def num_sequences(self) -> int:
        return 1

    @property
    def max_new_tokens(self) -> int:
        return 0

    @property
    def num_returned(self) -> int:
        return 1

    @property
    def is_search(self) -> bool:
        return False

    def validate(self) -> None:
        """Raise InvalidParameterError for a value out of its range."""
        _check_member("kind", PoolKind, self.kind)
        _check_member("activation", PoolActivation, self.activation)
        if type(self.normalize) is not bool:
            raise InvalidParameterError(
                f"normalize must be true or false, got {self.normalize!r}", param="normalize"
            )
        dimensions = self.dimensions
        is_number = type(dimensions) is int
        if dimensions is not None and not (is_number and 1 <= dimensions <= MAX_DIMENSIONS):
            raise InvalidParameterError(
                f"dimensions must be an integer in [1, {MAX_DIMENSIONS}], got {dimensions!r}",
                param="dimensions",
            )
        if self.kind.is_scores and (self.normalize or dimensions is not None):
            param = "normalize" if self.normalize else "dimensions"
            raise InvalidParameterError(
                f"{param} is for hidden states: scores (kind {self.kind}) have neither a length "
                f"nor dimensions, got {getattr(self, param)!r}",
                param=param,
            )
        num_tokens = len(self.token_ids)
        needed = "1 or more" if self.kind is PoolKind.LOGITS else "none"
        if (num_tokens > 0) != (self.kind is PoolKind.LOGITS) or num_tokens > MAX_SCORED_TOKENS:
            raise InvalidParameterError(
                f"token_ids must have {needed} tokens for kind {self.kind}, at most "
                f"{MAX_SCORED_TOKENS}, got {num_tokens}",
                param="token_ids",
            )
        if type(self.is_logprobs) is not bool or (self.is_logprobs and not self.token_ids):
            raise InvalidParameterError(
                f"is_logprobs must be true or false, and true only for kind logits, got "
                f"{self.is_logprobs!r}",
                param="is_logprobs",
            )


Task = Generate | Pool


class HasTask:
    """A message with a task."""

    __slots__ = ()

    @property
    def task(self) -> Task:
        """A field of the message."""
        raise NotImplementedError

    @property
    def generation(self) -> Generate:
        """The task of a message that generates."""
        assert isinstance(self.task, Generate), f"{self.task} generates no tokens"
        return self.task

    @property
    def sampling(self) -> SamplingParams:
        """Sampling parameters of a message that generates."""
        task = self.task
        assert isinstance(task, Generate), f"{task} generates no tokens"
        return task.sampling

    def with_sampling(self, sampling: SamplingParams) -> Self:
        """Return the message with other sampling parameters."""
        task = msgspec.structs.replace(self.generation, sampling=sampling)
        return msgspec.structs.replace(self, task=task)  # type: ignore[type-var]


def _check_member(name: str, kinds: type[enum.StrEnum], value: object) -> None:
    if not isinstance(value, kinds):
        raise InvalidParameterError(
            f"{name} must be one of {', '.join(kinds)}, got {value!r}", param=name
        )
