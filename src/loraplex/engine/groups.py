"""What the scheduler works on, made of what a client asked for: sequences and adapter handles."""

import itertools
from collections.abc import Callable

from loraplex.core.adapter import AdapterHandle
from loraplex.core.errors import InvalidRequestError, TokenOutOfVocabularyError
from loraplex.core.request import EngineRequest
from loraplex.core.sequence import Sequence, SequenceGroup
from loraplex.engine.adapter_handles import AdapterHandles


class SequenceGroups:
    """Gives each sequence its id."""

    def __init__(
        self,
        adapters: AdapterHandles,
        vocab_size: int,
        is_preloading: Callable[[AdapterHandle], bool],
    ) -> None:
        self._adapters = adapters
        self._vocab_size = vocab_size
        self._is_preloading = is_preloading
        self._sequence_ids = itertools.count(1)

    def make(self, request: EngineRequest) -> SequenceGroup:
        """The request's sequences. Raises a LoraplexError for a request that cannot be served."""
        request.sampling.validate()
        self._check_tokens(request.prompt_token_ids)
        adapters = self._adapters.resolve(request.adapters)
        if request.requires_resident:
            self._adapters.require_resident(request.adapters, self._is_preloading)
        seed = request.request_id if request.sampling.seed is None else request.sampling.seed
        outputs = dict(enumerate(request.outputs))
        sequences = [
            Sequence(
                sequence_id=next(self._sequence_ids),
                index=index,
                token_ids=[*request.prompt_token_ids, *outputs.get(index, ())],
                num_prompt_tokens=len(request.prompt_token_ids),
                seed=seed,
            )
            for index in range(request.sampling.num_sequences)
            if index not in request.ended
        ]
        return SequenceGroup(request, sequences, adapters)

    def _check_tokens(self, token_ids: tuple[int, ...]) -> None:
        if not token_ids:
            raise InvalidRequestError("the prompt has no tokens; at least one is needed")
        for token_id in (min(token_ids), max(token_ids)):
            if not 0 <= token_id < self._vocab_size:
                raise TokenOutOfVocabularyError(
                    f"token {token_id} is not in the model's vocabulary of "
                    f"{self._vocab_size} tokens"
                )
