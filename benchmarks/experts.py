r"""Decoding of a model with experts: with adapters on experts, on attention, and with none.

    PYTHONPATH=tests:benchmarks python benchmarks/experts.py [--size small] [--rounds 7] [--write]

A Mixtral of about 326 million random weights in bfloat16, of which a token uses 66 million: 12
layers of 32 experts, 4 for each token. 32 rows decode together, each with an adapter of its own of
rank 8, in contexts of 64 tokens. In each round every kind has a turn, in another order, and
transformers with PEFT has one: a batch of the same size with an adapter per row (`adapter_names`),
on attention, since PEFT has no such batches of adapters on experts. A turn is its median step;
quoted are medians over the rounds, of ratios within a round. --write: into
benchmarks/results/experts.md and .json.
"""

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from families import begin, finish, make_subject, seconds_of_step, write_model
from peft import LoraConfig, get_peft_model
from results_file import write_report
from step import RANK, Subject
from transformers import AutoModelForCausalLM, MixtralConfig, StoppingCriteria

from loraplex.bench.report import markdown_table

SIZES: Final[Mapping[str, Mapping[str, int]]] = {
    "full": {
        "vocab_size": 16_000,
        "hidden_size": 768,
        "intermediate_size": 320,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "max_position_embeddings": 1024,
    },
    "small": {
        "vocab_size": 1000,
        "hidden_size": 128,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 1024,
    },
}
CONTEXT: Final = 64
BASE, PEFT = "base only", "transformers + PEFT, attention"
ATTENTION: Final = ("q_proj", "k_proj", "v_proj", "o_proj")
MODULES: Final = {
    BASE: (),
    "attention": ATTENTION,
    "experts": ("experts.gate_proj", "experts.up_proj", "experts.down_proj"),
}


class Peer:
    """Model of transformers with an adapter of PEFT for each row of a batch."""

    def __init__(self, folder: Path, batch: int) -> None:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        self._vocab_size = model.config.vocab_size
        self._names = [f"adapter-{index}" for index in range(batch)]
        config = LoraConfig(r=RANK, target_modules=list(ATTENTION), init_lora_weights=False)
        self._model: Any = get_peft_model(
            model, config, adapter_name=self._names[0], autocast_adapter_dtype=False
        )
        for name in self._names[1:]:
            self._model.add_adapter(name, config, autocast_adapter_dtype=False)
        self._model.eval()

    @torch.inference_mode()
    def step_seconds(self, num_steps: int) -> float:
        """Return the median of so many decoding steps."""
        watch = _Watch()
        prompts = torch.randint(self._vocab_size, (len(self._names), CONTEXT - num_steps))
        self._model.generate(
            input_ids=prompts,
            attention_mask=torch.ones_like(prompts),
            adapter_names=self._names,
            max_new_tokens=num_steps + 1,
            min_new_tokens=num_steps + 1,
            do_sample=False,
            pad_token_id=0,
            stopping_criteria=[watch],
        )
        return statistics.median(end - start for start, end in itertools.pairwise(watch.times))


class _Watch(StoppingCriteria):
    """Notes when each step ends, and stops nothing."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(
        self,
        input_ids: torch.Tensor,
        scores: torch.Tensor,  # noqa: ARG002
        **_: Any,
    ) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool)


def step_seconds(subject: Subject, kind: str, batch: int, num_steps: int) -> float:
    """Return the median of so many decoding steps."""
    begin(subject, MODULES[kind], batch, num_steps, CONTEXT)
    seconds = statistics.median(seconds_of_step(subject) for _ in range(num_steps))
    finish(subject)
    return seconds


def measure(
    subject: Subject, peer: Peer, batch: int, num_rounds: int, num_steps: int
) -> list[dict[str, float]]:
    """Return the seconds of a step of each kind in each round."""
    for kind in MODULES:
        step_seconds(subject, kind, batch, 2)
    peer.step_seconds(2)
    kinds, rounds = [*MODULES, PEFT], []
    for number in range(num_rounds):
        turns: dict[str, float] = {}
        shift = number % len(kinds)
        for kind in kinds[shift:] + kinds[:shift]:
            if kind == PEFT:
                turns[kind] = peer.step_seconds(num_steps)
            else:
                turns[kind] = step_seconds(subject, kind, batch, num_steps)
        rounds.append(turns)
        print(", ".join(f"{kind} {1e3 * turns[kind]:.0f} ms" for kind in kinds), flush=True)
    return rounds


def rows_of(rounds: list[dict[str, float]], batch: int) -> list[dict[str, Any]]:
    """Return medians by kind: tokens in a second, and ratios to the base and to PEFT."""
    return [
        {
            "adapters": kind,
            "step_ms": 1e3 * statistics.median(turns[kind] for turns in rounds),
            "tokens_per_second": statistics.median(batch / turns[kind] for turns in rounds),
            "of_base": statistics.median(turns[BASE] / turns[kind] for turns in rounds),
            "of_peft": statistics.median(turns[PEFT] / turns[kind] for turns in rounds),
            "rounds_ms": [1e3 * turns[kind] for turns in rounds],
        }
        for kind in rounds[0]
    ]


def table(rows: list[dict[str, Any]]) -> str:
    head = ["adapters", "step ms", "tokens/s", "of base only", "times PEFT"]
    cells = [
        [
            row["adapters"],
            f"{row['step_ms']:.1f}",
            f"{row['tokens_per_second']:.0f}",
            f"{row['of_base']:.2f}",
            f"{row['of_peft']:.1f}",
        ]
        for row in rows
    ]
    return markdown_table(head, cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as name:
        folder = write_model(Path(name), MixtralConfig(**SIZES[arguments.size]))
        subject = make_subject(
            folder, arguments.batch, max_lora_rank=RANK, lora_device_bytes=2 << 30
        )
        peer = Peer(folder, arguments.batch)
        rounds = measure(subject, peer, arguments.batch, arguments.rounds, arguments.steps)
    rows = sorted(rows_of(rounds, arguments.batch), key=lambda row: -row["of_base"])
    print(table(rows))
    if arguments.write:
        write_report("experts", "Decoding of a model with experts", rows, table(rows))


if __name__ == "__main__":
    main()
