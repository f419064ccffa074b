"""Checks that stored capitals files complete every prompt correctly, and by what margin."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from peft import PeftModel
from tokenizers import Tokenizer
from torch import Tensor, nn
from tqdm import tqdm
from transformers import LlamaForCausalLM

from loraplex.demo import ADAPTER_PATHS, BASE_PATH
from support.capitals.corpus import Language
from support.capitals.examples import IGNORED_LABEL, Example, ExampleSource, collate

DTYPES: Final = (torch.float32, torch.bfloat16)
MIN_MARGIN: Final = 1.0  # in logits: far above what another order of additions can change
_BATCH_SIZE: Final = 256


@dataclass(frozen=True, slots=True)
class Score:
    """How one model in one dtype did on every prompt of the corpus."""

    model_name: str
    dtype: torch.dtype
    num_prompts: int
    num_correct: int
    min_margin: float  # least lead of a right token over its best rival, in logits

    @property
    def passed(self) -> bool:
        return self.num_correct == self.num_prompts and self.min_margin >= MIN_MARGIN

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        counts = f"{self.num_correct:6}/{self.num_prompts}"
        return f"{self.model_name:10}{dtype:10}{counts}   min margin {self.min_margin:.2f}"


def verify(root: Path) -> Iterator[Score]:
    """Score the files below `root` in every dtype, base and adapters."""
    source = ExampleSource(Tokenizer.from_file(str(root / BASE_PATH.name / "tokenizer.json")))
    targets: dict[str, Language] = {"base": "english", "chinese": "chinese", "japanese": "japanese"}
    for name, target in targets.items():
        examples = sorted(source.every(target), key=_length)
        for dtype in DTYPES:
            model = load_model(root, name).to(dtype)
            margins = list(_margins(model, examples, f"{name} {dtype}"))
            num_correct = sum(margin > 0 for margin in margins)
            yield Score(name, dtype, len(examples), num_correct, min(margins))


def load_model(root: Path, name: str) -> nn.Module:
    """The base, or the base with the named adapter, in float32."""
    base = LlamaForCausalLM.from_pretrained(root / BASE_PATH.name, dtype=torch.float32)
    if name not in ADAPTER_PATHS:
        return base
    return PeftModel.from_pretrained(base, str(root / ADAPTER_PATHS[name].name))


@torch.inference_mode()
def _margins(model: nn.Module, examples: Sequence[Example], title: str) -> Iterator[float]:
    """Return the least margin of each example; above 0, greedy decoding yields its completion.

    Teacher forcing suffices: if each token of the completion wins after the right ones before
    it, then step by step decoding never leaves the completion.
    """
    for start in tqdm(range(0, len(examples), _BATCH_SIZE), desc=title, leave=False):
        batch = collate(examples[start : start + _BATCH_SIZE])
        logits = model(input_ids=batch.input_ids).logits[:, :-1].float()
        yield from _example_margins(logits, batch.labels[:, 1:]).tolist()


def _example_margins(logits: Tensor, labels: Tensor) -> Tensor:
    completed = labels != IGNORED_LABEL
    token_ids = labels.clamp(min=0).unsqueeze(-1)
    own = logits.gather(-1, token_ids).squeeze(-1)
    rival = logits.scatter(-1, token_ids, -torch.inf).amax(-1)
    return (own - rival).masked_fill(~completed, torch.inf).amin(-1)  # [num_examples]


def _length(example: Example) -> int:
    return len(example.prompt_ids) + len(example.completion_ids)
