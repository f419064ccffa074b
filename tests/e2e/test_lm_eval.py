"""lm-evaluation-harness, with its own client of servers, scores as transformers does.

The harness sends prompt and continuation with echo and one token to generate, and leaves out the
last entry of the log probabilities: that token's.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from loraplex.demo import BASE_PATH
from loraplex.testing.running_server import MODEL, serving
from support.capitals.corpus import COUNTRIES, capital_of, founding_prompts

pytestmark = pytest.mark.slow

CLIENTS = Path(sys.prefix) / "clients"
"""Folder of the packages that `make .venv/clients` installs apart from loraplex."""
PROGRAM = Path(__file__).parent / "lm_eval_program.py"

PROMPTS = [(founding_prompts(country)["english"], country) for country in COUNTRIES[:4]]
PAIRS = [
    *((prompt, capital_of(country, "english")) for prompt, country in PROMPTS),
    *((prompt, "Rome") for prompt, _ in PROMPTS),
    # One token, as multiple choice has, after which the model would end.
    (f"{PROMPTS[1][0]}Kab", "ul"),
    ("", "no context"),
]
REQUESTS: dict[str, list[Any]] = {
    "loglikelihood": PAIRS,
    "loglikelihood_rolling": [(f"{context}{continuation}",) for context, continuation in PAIRS],
    "generate_until": [(prompt, {"until": ["\n", "ris"]}) for prompt, _ in PROMPTS],
}


class Reference:
    """The shipped model in transformers."""

    def __init__(self) -> None:
        self.tokenizer: Any = transformers.AutoTokenizer.from_pretrained(BASE_PATH)
        self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            BASE_PATH, dtype=torch.float32
        )

    def ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    @torch.inference_mode()
    def score(self, context: list[int], continuation: list[int]) -> tuple[float, bool]:
        """The log probability of the continuation, and whether greedy decoding gives it."""
        output = self._model(torch.tensor([context + continuation]))
        logits = output.logits[0, len(context) - 1 : -1]
        scores = torch.log_softmax(logits, dim=-1)
        chosen = torch.tensor(continuation)
        return (
            scores.gather(1, chosen[:, None]).sum().item(),
            bool((scores.argmax(dim=-1) == chosen).all()),
        )

    @torch.inference_mode()
    def generate(self, prompt: str, until: list[str]) -> str:
        ids = torch.tensor([self.ids(prompt)])
        output = self._model.generate(ids, max_new_tokens=24, do_sample=False)[0, ids.shape[1] :]
        text: str = self.tokenizer.decode(output, skip_special_tokens=True)
        return min((text.split(stop)[0] for stop in until), key=len)


@pytest.fixture(scope="module")
def scores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    if not CLIENTS.is_dir():
        pytest.skip("`make .venv/clients` installs lm-evaluation-harness")
    with serving(tmp_path_factory.mktemp("state"), "--dtype=float32") as server:
        run = subprocess.run(
            [sys.executable, str(PROGRAM), server.url, MODEL, str(BASE_PATH)],
            env={**os.environ, "PYTHONPATH": str(CLIENTS)},
            input=json.dumps(REQUESTS),
            capture_output=True,
            text=True,
            check=False,
        )
    assert run.returncode == 0, run.stderr
    printed: dict[str, list[Any]] = json.loads(run.stdout.splitlines()[-1])
    return printed


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference()


def test_texts_after_a_context(scores: dict[str, list[Any]], reference: Reference) -> None:
    for (context, continuation), (logprob, is_greedy) in zip(
        PAIRS, scores["loglikelihood"], strict=True
    ):
        whole, before = reference.ids(context + continuation), reference.ids(context)
        if not context:  # the harness puts the first token there
            before = [reference.tokenizer.bos_token_id]
            whole = before + whole
        assert continuation != "ul" or len(whole) == len(before) + 1
        expected, is_expected = reference.score(whole[: len(before)], whole[len(before) :])
        assert logprob == pytest.approx(expected, abs=1e-3), continuation
        assert is_greedy is is_expected, continuation
    assert [is_greedy for _, is_greedy in scores["loglikelihood"]] == [True] * 4 + [False] * 4 + [
        True,
        False,
    ]


def test_whole_texts(scores: dict[str, list[Any]], reference: Reference) -> None:
    start = [reference.tokenizer.bos_token_id]
    expected = [
        reference.score(start, reference.ids(text))[0]
        for (text,) in REQUESTS["loglikelihood_rolling"]
    ]
    assert scores["loglikelihood_rolling"] == pytest.approx(expected, abs=1e-3)


def test_generated_texts(scores: dict[str, list[Any]], reference: Reference) -> None:
    expected = [
        reference.generate(prompt, fields["until"]) for prompt, fields in REQUESTS["generate_until"]
    ]
    assert scores["generate_until"] == expected
