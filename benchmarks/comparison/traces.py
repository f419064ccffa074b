"""The published load generators of LoRA serving, drawn as their papers' code draws them.

S-LoRA (MLSys 2024, `benchmarks/trace.py`, generate_requests) and Punica (MLSys 2024,
`benchmarks/bench_textgen*.py`). What is known to be wrong in them is put right and said: prompts
are random tokens (S-LoRA repeats one word, so that a prefix cache would serve most of a prompt),
and a Punica request keeps its own adapter while it decodes (there, a lost index gave all rows of
a step one adapter).
"""

import msgspec
import numpy as np

from loraplex.bench.popularity import Popularity
from loraplex.bench.popularity import draw as draw_popularity
from loraplex.bench.workload import PlannedRequest

_PUNICA_SEED = 0xABCDABCD987
_LOGNORMAL_SHAPE, _LOGNORMAL_LOCATION, _LOGNORMAL_SCALE = 0.8, -1.0, 18.0


class SloraTrace(msgspec.Struct, frozen=True, kw_only=True, tag="s-lora"):
    """An open loop of `seconds`. The draws and their order are S-LoRA's (numpy's legacy
    generator), so adapters, lengths and times are those of its paper for the same values.
    """

    num_adapters: int
    alpha: float = 1.0
    """P(adapter < k) = (k / n) ** alpha: uniform at 1, and more skewed below."""
    requests_per_second: float = 2.0
    cv: float = 1.0
    """Coefficient of variation of the gaps."""
    seconds: float = 300.0
    prompt_tokens: tuple[int, int] = (8, 512)
    """[low, high): the end is not drawn."""
    output_tokens: tuple[int, int] = (8, 512)
    seed: int = 42

    def __str__(self) -> str:
        return (
            f"s-lora n={self.num_adapters} alpha={self.alpha:g} "
            f"rate={self.requests_per_second:g} cv={self.cv:g} {self.seconds:g}s"
        )

    @property
    def concurrency(self) -> None:
        """None: each request is sent when it is due."""
        return None

    def generate(self, repeat: int, vocabulary: range) -> list[PlannedRequest]:
        """The same adapters, lengths and times in every repeat; other prompts."""
        draws = np.random.RandomState(self.seed)
        count = int(self.requests_per_second * self.seconds)
        adapters = (draws.power(self.alpha, count) * self.num_adapters).astype(int)
        prompt_lengths = draws.randint(*self.prompt_tokens, count)
        output_lengths = draws.randint(*self.output_tokens, count)
        shape, scale = self.cv**-2, self.cv**2 / self.requests_per_second
        due = np.cumsum(draws.gamma(shape, scale, count))
        return _planned(
            prompt_lengths.tolist(),
            output_lengths.tolist(),
            adapters.tolist(),
            due.tolist(),
            prompts=np.random.default_rng([self.seed, repeat]),
            vocabulary=vocabulary,
        )


class PunicaTrace(msgspec.Struct, frozen=True, kw_only=True, tag="punica"):
    """A closed loop of `concurrency` requests at a time.

    Prompts are lognormal; prompt and output together are uniform in [0, max_model_len), at least
    the prompt and 2. The paper's text has 101k tokens for 1,000 requests and this rule gives ten
    times that at 2048, so the figure of the paper was made otherwise: do not compare with it.
    """

    popularity: Popularity
    num_adapters: int
    num_requests: int = 1024
    concurrency: int = 32
    """Clients, each sending its next request when its last response is complete."""
    max_model_len: int = 2048

    def __str__(self) -> str:
        return (
            f"punica {self.popularity} n={self.num_adapters} {self.num_requests} requests of at "
            f"most {self.max_model_len}"
        )

    def generate(self, repeat: int, vocabulary: range) -> list[PlannedRequest]:
        """The same adapters and lengths in every repeat; other prompts."""
        draws = np.random.Generator(np.random.PCG64(_PUNICA_SEED))
        count, longest = self.num_requests, self.max_model_len
        lognormal = np.exp(_LOGNORMAL_SHAPE * draws.standard_normal(count)) * _LOGNORMAL_SCALE
        prompt_lengths = np.clip(lognormal + _LOGNORMAL_LOCATION, 1, longest - 2).astype(int)
        totals = np.maximum(draws.integers(0, longest, count), prompt_lengths + 2)
        adapters = draw_popularity(
            self.popularity, count, self.num_adapters, f"punica/{_PUNICA_SEED}"
        )
        return _planned(
            prompt_lengths.tolist(),
            (totals - prompt_lengths).tolist(),
            adapters,
            [0.0] * count,
            prompts=np.random.default_rng([_PUNICA_SEED, repeat]),
            vocabulary=vocabulary,
        )


def _planned(
    prompt_lengths: list[int],
    output_lengths: list[int],
    adapters: list[int | None],
    due: list[float],
    *,
    prompts: np.random.Generator,
    vocabulary: range,
) -> list[PlannedRequest]:
    return [
        PlannedRequest(
            prompt_token_ids=tuple(
                prompts.integers(vocabulary.start, vocabulary.stop, prompt_length).tolist()
            ),
            num_output_tokens=output_length,
            adapter=adapter,
            due_seconds=due_seconds,
        )
        for prompt_length, output_length, adapter, due_seconds in zip(
            prompt_lengths, output_lengths, adapters, due, strict=True
        )
    ]
