"""The function that a FakeRunner computes: tokens that depend on everything they should."""

import dataclasses
import hashlib
import random
import struct
from collections.abc import Iterable, Sequence

from loraplex.core.request import EngineRequest
from loraplex.core.sampling_params import SamplingParams

State = bytes
"""What the KV of one position holds: a hash of its token, of all before, and of the adapters."""

EMPTY_STATE: State = b""

_STATE_BYTES = 16


@dataclasses.dataclass(frozen=True, slots=True)
class FakeModel:
    """A next token is a hash of all tokens so far, the adapters, and (unless greedy) the draw.

    So a lost or doubled token, a wrong position, stale KV or a wrong adapter changes the output.
    With `eos_rate`, about that share of the tokens is `eos_token_id`; no other token is.
    """

    vocab_size: int = 1000
    eos_token_id: int = 0
    eos_rate: float = 0.0

    def extend(
        self, state: State, token_ids: Iterable[int], adapters: Sequence[tuple[str, float]]
    ) -> list[State]:
        """The states of the positions that follow one with `state`; adapters: (digest, scale)."""
        tag = repr(tuple(adapters)).encode()
        states = []
        for token_id in token_ids:
            content = state + struct.pack("<q", token_id) + tag
            state = hashlib.blake2b(content, digest_size=_STATE_BYTES).digest()
            states.append(state)
        return states

    def sample(
        self,
        state: State,
        sampling: SamplingParams,
        seed: int,
        sequence_index: int,
        output_index: int,
        suppressed_token_ids: Sequence[int] = (),
    ) -> int:
        """The token after the position with `state`."""
        draw = b"greedy"
        if not sampling.is_greedy:
            draw = f"{seed} {sequence_index} {output_index}".encode()
        digest = hashlib.blake2b(state + draw, digest_size=_STATE_BYTES).digest()
        chance, number = struct.unpack("<2Q", digest)
        banned = suppressed_token_ids if output_index < sampling.min_tokens else ()
        if chance < self.eos_rate * 2**64 and self.eos_token_id not in banned:
            return self.eos_token_id
        token_id = int(number % self.vocab_size)
        while token_id == self.eos_token_id or token_id in banned:
            token_id = (token_id + 1) % self.vocab_size
        return token_id

    def candidates(
        self,
        state: State,
        count: int,
        sampling: SamplingParams,
        output_index: int,
        suppressed_token_ids: Sequence[int] = (),
    ) -> list[tuple[int, float]]:
        """`count` tokens that may follow the position with `state`, the likeliest first.

        Each with a log probability; one token in four is as likely as the one before it.
        """
        banned = suppressed_token_ids if output_index < sampling.min_tokens else ()
        token_ids = [t for t in range(self.vocab_size) if t not in banned]
        draws = random.Random(state)
        chosen = draws.sample(token_ids, min(count, len(token_ids)))
        logprob, found = -draws.random(), []
        for token_id in chosen:
            logprob -= draws.choice([0.0, 0.125, 0.5, 1.0])
            found.append((token_id, logprob))
        return found

    def output(self, request: EngineRequest, sequence_index: int, max_tokens: int) -> list[int]:
        """Return the tokens of a sequence that runs alone, up to max_tokens; no stop is applied."""
        adapters = [(use.digest, use.scale) for use in request.adapters]
        sampling = request.sampling
        seed = request.request_id if sampling.seed is None else sampling.seed
        ends = () if sampling.ignore_eos else request.eos_token_ids
        suppressed = (*ends, *sampling.stop_token_ids)
        state = self.extend(EMPTY_STATE, request.prompt_token_ids, adapters)[-1]
        token_ids: list[int] = []
        for output_index in range(max_tokens):
            token_id = self.sample(state, sampling, seed, sequence_index, output_index, suppressed)
            token_ids.append(token_id)
            (state,) = self.extend(state, [token_id], adapters)
        return token_ids
