"""The function that a FakeRunner computes: tokens that depend on everything they should."""

import dataclasses
import hashlib
import random
import struct
from collections.abc import Iterable, Sequence

from loraplex.core.image import ImageSpan
from loraplex.core.request import EngineRequest
from loraplex.core.sampling_params import SamplingParams
from loraplex.core.task import Pool

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

    def encode(
        self, token_ids: Sequence[int], adapters: Sequence[tuple[str, float]]
    ) -> list[State]:
        """Return what the blocks of an encoder's positions hold: each depends on all tokens."""
        content = repr((tuple(token_ids), tuple(adapters))).encode()
        return [
            hashlib.blake2b(content, digest_size=_STATE_BYTES, salt=struct.pack("<q", i)).digest()
            for i in range(len(token_ids))
        ]

    def prompt(
        self,
        token_ids: Sequence[int],
        images: Iterable[ImageSpan],
        adapters: Sequence[tuple[str, float]],
        encoder_token_ids: Sequence[int] = (),
    ) -> list[State]:
        """The states of a prompt: positions of an image have its rows in place of tokens.

        All depend on the encoder's input.
        """
        inputs: list[int | bytes] = list(token_ids)
        for image in images:
            rows = [image.digest + bytes([row % 256]) for row in range(image.num_tokens)]
            inputs[image.first : image.end] = rows
        start = b"".join(self.encode(encoder_token_ids, adapters)[-1:]) or EMPTY_STATE
        return self.extend(start, inputs, adapters)

    def extend(
        self,
        state: State,
        inputs: Iterable[int | bytes],
        adapters: Sequence[tuple[str, float]],
    ) -> list[State]:
        """The states of the positions that follow one with `state`; adapters: (digest, scale).

        inputs: tokens, or what an encoder gave.
        """
        tag = repr(tuple(adapters)).encode()
        states = []
        for given in inputs:
            packed = given if isinstance(given, bytes) else struct.pack("<q", given)
            content = state + packed + tag
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

    def vector(self, state: State, pool: Pool) -> bytes:
        """Return the vector of the position with `state`: its bytes as numbers.

        A head has one label; scores are in [-2, 2).
        """
        values = [float(byte) for byte in state[: pool.dimensions]]
        if pool.kind.is_scores:
            values = [byte / 64 - 2 for byte in state[: len(pool.token_ids) or 1]]
        return struct.pack(f"<{len(values)}f", *values)

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

    def pooled(self, request: EngineRequest) -> bytes:
        """Return the vector of a request that runs alone."""
        assert isinstance(request.task, Pool)
        adapters = [(use.digest, use.scale) for use in request.adapters]
        state = self.prompt(
            request.prompt_token_ids, request.images, adapters, request.encoder_token_ids
        )[-1]
        return self.vector(state, request.task)

    def output(self, request: EngineRequest, sequence_index: int, max_tokens: int) -> list[int]:
        """Return the tokens of a sequence that runs alone, up to max_tokens; no stop is applied."""
        adapters = [(use.digest, use.scale) for use in request.adapters]
        sampling = request.sampling
        seed = request.request_id if sampling.seed is None else sampling.seed
        ends = () if sampling.ignore_eos else request.eos_token_ids
        suppressed = (*ends, *sampling.stop_token_ids)
        state = self.prompt(
            request.prompt_token_ids, request.images, adapters, request.encoder_token_ids
        )[-1]
        token_ids: list[int] = []
        for output_index in range(max_tokens):
            token_id = self.sample(state, sampling, seed, sequence_index, output_index, suppressed)
            token_ids.append(token_id)
            (state,) = self.extend(state, [token_id], adapters)
        return token_ids
