"""Requests that together use every feature of an engine.

Parameters that end or change an output (stop runs, bad words) are taken from the model's output
without them, so that they take effect.
"""

import random
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from loraplex.core.adapter import AdapterUse
from loraplex.core.beam_search import BeamSearch, EarlyStopping
from loraplex.core.request import EngineRequest
from loraplex.core.sampling_params import SamplingParams
from loraplex.core.task import Generate
from support.grammar_tokens import EOS, FIRST_BYTE, VOCAB_SIZE, regex, schema

LONGEST_PROMPT: Final = 90
MAX_TOKENS: Final = 12
SCHEMA: Final = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 3}, "ab": {"type": "boolean"}},
    "required": ["name", "ab"],
    "additionalProperties": False,
}

Wish = Callable[[EngineRequest], tuple[int, ...]]
"""Gives the tokens of a request's first sequence."""


class FeatureRequests:
    """Makes them; request i has id i."""

    def __init__(
        self,
        digests: Sequence[str],
        wish: Wish,
        encoder_inputs: Sequence[tuple[int, ...]] = (),
    ) -> None:
        """digests: of at least three adapters. encoder_inputs: requests have them in turn."""
        self._draws = random.Random("feature requests")
        self._wish = wish
        self._encoder_inputs = encoder_inputs
        self._requests: list[EngineRequest] = []
        self._base: tuple[AdapterUse, ...] = ()
        self._one, self._two, self._three = ((AdapterUse(digest),) for digest in digests[:3])
        self._both = (AdapterUse(digests[0], 1.0), AdapterUse(digests[2], 0.5))
        self._long = self._tokens(LONGEST_PROMPT)
        """Most prompts begin like it."""
        period = self._tokens(4)
        self._periodic = period * 6

    def make(self) -> list[EngineRequest]:
        self._add_choices()
        self._add_bans_and_stops()
        self._add_several()
        self._add_beams()
        self._add_grammars()
        self._add_prompts()
        return self._requests

    def _add_choices(self) -> None:
        """How a token is chosen."""
        self._add(self._like(16, 5), self._base, temperature=0.0)
        self._add(self._like(16, 5), self._one, temperature=0.0, logprobs=0)
        self._add(self._like(16, 5), self._two, temperature=0.0, logprobs=1)
        self._add(self._like(30, 1), self._both, temperature=0.0, logprobs=1)
        self._add(
            self._like(16, 9),
            self._two,
            temperature=0.9,
            top_k=40,
            top_p=0.95,
            min_p=0.01,
            logprobs=2,
        )
        self._add(self._like(0, 6), self._base, temperature=1.0)
        decay: dict[str, Any] = {"top_p_decay": 0.7, "top_p_min": 0.2, "top_p_reset_id": 40}
        self._add(self._like(21, 6), self._one, temperature=1.5, logprobs=1, top_p=0.99, **decay)
        penalties: dict[str, Any] = {
            "repetition_penalty": 1.3,
            "presence_penalty": 0.5,
            "frequency_penalty": 0.3,
            "logprobs": 3,
        }
        self._add(self._periodic, self._three, temperature=0.0, **penalties)
        self._add(self._like(33, 0), self._both, temperature=1.1, n=3, **penalties)

    def _add_bans_and_stops(self) -> None:
        prompt = self._like(20, 4)
        said = self._said(prompt, self._one)
        greedy: dict[str, Any] = {"temperature": 0.0, "logprobs": 1}
        bad = ((said[0],), (said[2], said[3]), (said[5],))
        self._add(prompt, self._one, bad_token_ids=bad, **greedy)
        bias = ((said[1], -float("inf")), (said[4], -9.0), (VOCAB_SIZE - 1, 0.5))
        self._add(prompt, self._one, logit_bias=tuple(sorted(dict(bias).items())), **greedy)
        self._add(prompt, self._one, stop_token_sequences=((1, 1), said[4:6]), **greedy)
        self._add(prompt, self._one, stop_token_ids=(said[6],), **greedy)
        self._add(
            prompt,
            self._one,
            ends=(said[2],),
            min_tokens=5,
            stop_token_ids=(said[1],),
            **greedy,
        )
        self._add(prompt, self._one, ends=(said[2],), ignore_eos=True, num_draft_tokens=2, **greedy)
        allowed = tuple(range(10, 60))
        self._add(prompt, self._base, allowed_token_ids=allowed, temperature=1.0, logprobs=2)
        self._add(self._periodic, self._base, no_repeat_ngram_size=2, num_draft_tokens=4, **greedy)
        self._add(self._periodic, self._base, num_draft_tokens=4, max_tokens=30, **greedy)

    def _add_several(self) -> None:
        self._add(self._like(40, 3), self._three, temperature=1.0, n=3, prompt_logprobs=2)
        self._add(self._like(12, 0), self._base, temperature=1.2, n=2, best_of=4, logprobs=0)

    def _add_beams(self) -> None:
        self._add(self._like(18, 2), self._base, n=2, beam=BeamSearch(width=2))
        beam = BeamSearch(
            width=4, length_penalty=0.6, diversity_rate=0.5, early_stopping=EarlyStopping.NEVER
        )
        self._add(self._like(24, 0), self._two, n=3, beam=beam, logprobs=1, max_tokens=8)
        prompt = self._like(10, 3)
        said = self._said(prompt, self._three)
        self._add(
            prompt,
            self._three,
            ends=(said[4], said[7]),
            beam=BeamSearch(width=3, early_stopping=EarlyStopping.AT_ONCE),
            bad_token_ids=((said[1], said[2]),),
            repetition_penalty=1.2,
            no_repeat_ngram_size=2,
            prompt_logprobs=1,
            return_prompt_logits=True,
        )

    def _add_grammars(self) -> None:
        self._add(self._like(16, 2), self._one, grammar=regex("[a-f]{3,9}c"), temperature=0.0)
        json: dict[str, Any] = {"grammar": schema(SCHEMA), "max_tokens": 40}
        self._add(self._like(16, 2), self._two, temperature=1.0, logprobs=1, **json)
        self._add(self._periodic, self._base, temperature=0.0, num_draft_tokens=4, **json)
        forced = regex("(a text that is forced|an completion)")
        self._add(self._like(8, 1), self._base, temperature=1.0, n=2, grammar=forced, max_tokens=30)
        digits = regex("[0-9]{2,6}")
        self._add(self._like(8, 1), self._three, n=2, beam=BeamSearch(width=2), grammar=digits)

    def _add_prompts(self) -> None:
        self._add(self._long, self._both, temperature=0.0, prompt_logprobs=0, logprobs=1)
        self._add(
            self._like(70, 10), self._both, temperature=1.0, n=2, return_logits=True, logprobs=0
        )
        self._add(
            self._like(45, 2),
            self._base,
            temperature=1.0,
            return_logits=True,
            return_prompt_logits=True,
        )
        self._add(self._tokens(1), self._two, temperature=1.0, max_tokens=1, logprobs=1)

    def _add(
        self,
        prompt: tuple[int, ...],
        adapters: tuple[AdapterUse, ...],
        *,
        ends: tuple[int, ...] = (EOS,),
        **sampling: Any,
    ) -> None:
        sampling = {"max_tokens": MAX_TOKENS, "seed": 7 * len(self._requests)} | sampling
        request = EngineRequest(
            request_id=len(self._requests),
            prompt_token_ids=prompt,
            task=Generate(SamplingParams(**sampling)),
            eos_token_ids=ends,
            adapters=adapters,
            kv_salt=repr(adapters).encode(),
            tenant="",
            priority=0,
            arrival_ns=len(self._requests),
            deadline_ns=None,
        )
        if self._encoder_inputs:
            given = self._encoder_inputs[len(self._requests) % len(self._encoder_inputs)]
            request = msgspec.structs.replace(request, encoder_token_ids=given)
        self._requests.append(request)

    def _said(self, prompt: tuple[int, ...], adapters: tuple[AdapterUse, ...]) -> tuple[int, ...]:
        """Greedily, without anything else."""
        self._add(prompt, adapters, ends=(), temperature=0.0)
        return self._wish(self._requests.pop())

    def _like(self, num_shared: int, num_own: int) -> tuple[int, ...]:
        return self._long[:num_shared] + self._tokens(num_own)

    def _tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self._draws.randrange(FIRST_BYTE, VOCAB_SIZE) for _ in range(count))
