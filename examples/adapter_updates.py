"""Reinforcement learning against a running server: sample, train, replace the adapter, roll back.

    pip install torch peft httpx
    python examples/adapter_updates.py --url http://localhost:8000 --base src/loraplex/demo/base

In each round the server samples completions with the present adapter. Their rewards train the
adapter for one step, and the server replaces its own with the saved one; in-flight requests end on
the version with which they began. If the new version earns less, both sides roll back. The server
must be able to read `--folder`.

The reward of this example prefers Chinese and Japanese characters, whatever they mean: write your
own. The loop stays the same.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch
from peft import (
    LoraConfig,
    PeftModel,
    get_peft_model,
    get_peft_model_state_dict,
    set_peft_model_state_dict,
)
from transformers import AutoModelForCausalLM

PROMPTS = [f"What is the capital of {country}?" for country in ("France", "Italy", "Japan", "Peru")]
SAMPLES_PER_PROMPT = 8
MAX_TOKENS = 16
TEMPERATURE = 2.0
"""High, because the shipped tiny model is sure of its completions: without variety no reward
differs. Larger models take 1."""
LEARNING_RATE = 0.01


@dataclass
class Sample:
    """One completion, with the server's own ids: tokenizing its text may give others."""

    prompt_ids: list[int]
    token_ids: list[int]
    text: str


def reward(text: str) -> float:
    """Return the share of the characters that are beyond ASCII."""
    return sum(not character.isascii() for character in text) / max(len(text), 1)


class Policy:
    """The adapter as the server has it."""

    def __init__(self, client: httpx.Client, base: str, name: str) -> None:
        self._client = client
        self._base = base
        self._name = name
        self._digest = ""
        """Digest of the version that is served; empty for the base model."""
        self._previous = ""

    def sample(self, seed: int) -> list[Sample]:
        """Return the completions of all prompts, all in one batch."""
        response = self._client.post(
            "/v1/completions",
            json={
                "model": self._name if self._digest else self._base,
                "prompt": PROMPTS,
                "n": SAMPLES_PER_PROMPT,
                "seed": seed,
                "temperature": TEMPERATURE,
                "max_tokens": MAX_TOKENS,
                "return_token_ids": True,
            },
        )
        check(response)
        if (used := response.headers.get("x-loraplex-adapter", "")) != self._digest:
            raise RuntimeError(f"sampled from adapter {used}, and {self._digest} was loaded")
        return [
            Sample(choice["prompt_token_ids"], choice["token_ids"], choice["text"])
            for choice in response.json()["choices"]
        ]

    def load(self, folder: Path) -> int:
        """Replace the served adapter by the one in a folder, and return its version."""
        body = {"name": self._name, "source": str(folder), "replace": True}
        response = self._client.post("/v1/adapters", json=body)
        check(response)
        self._previous, self._digest = self._digest, response.json()["digest"]
        version: int = response.json()["version"]
        return version

    def roll_back(self) -> None:
        """Serve the version before the present one again."""
        if self._previous:
            check(self._client.post(f"/v1/adapters/{self._name}/rollback", json={}))
        else:
            self.unload()
        self._digest = self._previous

    def unload(self) -> None:
        """Unload the adapter; requests that use it end normally."""
        check(self._client.delete(f"/v1/adapters/{self._name}"))


def check(response: httpx.Response) -> None:
    """Raise an error with the server's message."""
    if response.is_error:
        raise RuntimeError(f"{response.request.url}: {response.status_code} {response.text}")


class Trainer:
    """The adapter as it is trained."""

    def __init__(self, base: Path) -> None:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        self._model: PeftModel = get_peft_model(
            model, LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "k_proj", "v_proj"])
        )
        self._optimizer = torch.optim.AdamW(
            (weight for weight in self._model.parameters() if weight.requires_grad),
            lr=LEARNING_RATE,
        )

    def state(self) -> dict[str, Any]:
        """Return a copy of what a roll back needs."""
        weights = get_peft_model_state_dict(self._model)
        return {name: weight.clone() for name, weight in weights.items()}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a copied state."""
        set_peft_model_state_dict(self._model, state)
        self._optimizer.state.clear()

    def step(self, samples: Sequence[Sample], rewards: Sequence[float]) -> None:
        """Make completions likelier that earned more than the others of their prompt."""
        self._optimizer.zero_grad()
        for begin in range(0, len(samples), SAMPLES_PER_PROMPT):
            group = slice(begin, begin + SAMPLES_PER_PROMPT)
            mean = statistics.fmean(rewards[group])
            for sample, earned in zip(samples[group], rewards[group], strict=True):
                loss = (mean - earned) * self._log_probability(sample) / len(samples)
                torch.autograd.backward(loss)
        self._optimizer.step()

    def save(self, folder: Path) -> None:
        """Write the adapter in PEFT's format."""
        self._model.save_pretrained(str(folder))

    def _log_probability(self, sample: Sample) -> torch.Tensor:
        """Return that of a completion, by token, as the server sampled it."""
        tokens = torch.tensor(sample.token_ids)
        logits = self._model(torch.tensor([sample.prompt_ids + sample.token_ids])).logits[0]
        logits = logits[len(sample.prompt_ids) - 1 : -1] / TEMPERATURE
        return torch.log_softmax(logits, dim=-1).gather(1, tokens[:, None]).mean()


def train(policy: Policy, trainer: Trainer, folder: Path, rounds: int) -> None:
    """Sample, train, replace; roll back what earned less."""
    for number in range(1, rounds + 1):
        samples = policy.sample(seed=number)
        rewards = [reward(sample.text) for sample in samples]
        before = statistics.fmean(rewards)
        state = trainer.state()
        trainer.step(samples, rewards)
        # A folder of its own, so that nothing changes files that the server may be reading.
        trainer.save(folder / f"round-{number}")
        version = policy.load(folder / f"round-{number}")
        after = statistics.fmean(reward(sample.text) for sample in policy.sample(seed=number))
        if after < before:
            policy.roll_back()
            trainer.restore(state)
        result = "rolled back" if after < before else "kept"
        print(f"round {number}: version {version}, reward {before:.2f} -> {after:.2f}, {result}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://localhost:8000")
    parser.add_argument("--model", default="capitals", help="the server's name of the base model")
    parser.add_argument("--base", type=Path, default=Path("src/loraplex/demo/base"))
    parser.add_argument("--adapter", default="policy", help="name of the adapter to be trained")
    parser.add_argument("--folder", type=Path, help="of the saved adapters (default: a new one)")
    parser.add_argument("--rounds", type=int, default=4)
    args = parser.parse_args(arguments)
    folder = args.folder or Path(tempfile.mkdtemp(prefix="adapter-updates-"))
    with httpx.Client(base_url=args.url, timeout=120) as client:
        train(Policy(client, args.model, args.adapter), Trainer(args.base), folder, args.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
