"""What the backend generated -> output tensors of a model of the vLLM backend.

Shapes have no batch dimension: [sequences] each, num_input_tokens [1]. Where a stream brings a
sequence in pieces, text, log probabilities and num_output_tokens are of the piece.
"""

import functools
import json
from collections.abc import Callable, Sequence

from loraplex.frontends.kserve.models.completion import Completion
from loraplex.frontends.kserve.tensors import Tensor, numbers, strings

RUNNING = "None"
"""The finish reason of a sequence that goes on."""
NO_LOGPROBS = "null"


def vllm_tensors(completions: Sequence[Completion]) -> list[Tensor]:
    """The outputs of one request: what it wished for comes in every response."""
    makers: dict[str, Callable[[], Tensor]] = {
        "finish_reason": lambda: strings("finish_reason", [_finish_reason(a) for a in completions]),
        "cumulative_logprob": lambda: numbers(
            "cumulative_logprob", "FP32", [a.cum_log_prob for a in completions]
        ),
        "logprobs": lambda: strings("logprobs", [_logprobs(a) for a in completions]),
        "num_input_tokens": lambda: numbers(
            "num_input_tokens", "UINT32", [completions[0].num_input_tokens]
        ),
        "num_output_tokens": lambda: numbers(
            "num_output_tokens", "UINT32", [a.num_new_tokens for a in completions]
        ),
    }
    returned = completions[0].generation.returned
    return [
        strings("text_output", [completion.whole_text for completion in completions]),
        *(make() for name, make in makers.items() if name in returned),
    ]


def _finish_reason(completion: Completion) -> str:
    return RUNNING if completion.finish_reason is None else completion.finish_reason.value


def _logprobs(completion: Completion) -> str:
    """A JSON list: for each token the chosen and the most likely ones, by token id."""
    token_text = completion.generation.token_text
    if token_text is None:
        return NO_LOGPROBS
    text_of = functools.cache(token_text)
    rows = []
    for entry in completion.entries:
        shown = {entry.token_id: (entry.logprob, entry.rank)}
        for rank, (token_id, logprob) in enumerate(entry.top, start=1):
            shown.setdefault(token_id, (logprob, rank))
        row = {
            str(token_id): {"logprob": logprob, "rank": rank, "decoded_token": text_of(token_id)}
            for token_id, (logprob, rank) in shown.items()
        }
        rows.append(json.dumps(row))  # one at a time: other threads run in between
    return f"[{', '.join(rows)}]"
