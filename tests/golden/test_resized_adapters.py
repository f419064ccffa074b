"""Adapters that were trained after resize_token_embeddings, against PEFT on the resized base.

PEFT then saves the embedding and the output layer with every adapter, in up to three copies. The
base is resized once more to be served, so that the new rows are equal, or others.
"""

import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig

from loraplex import LLM, SamplingParams
from loraplex.adapters.staged import StagedAdapter, StageRequest
from loraplex.adapters.staging_worker import stage
from loraplex.app.builder import base_shapes
from loraplex.core.errors import AdapterMismatchError
from loraplex.demo import BASE_PATH
from loraplex.models.registry import read_config
from support.checkpoints import save_random_model, tiny_sizes
from support.examples import quick_and_slow

pytestmark = pytest.mark.usefixtures("one_thread")

VOCAB_SIZE, RESIZED = 199, 203
PROMPT = [3, 9, 200, 17, 202, 5]
NUM_NEW_TOKENS = 4
TOLERANCE = 1e-4
TARGETS = ["q_proj", "down_proj"]
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "copy-of-embedding": {"modules_to_save": ["embed_tokens"]},
    "copy-of-head": {"modules_to_save": ["lm_head"]},
    "copies": {"modules_to_save": ["embed_tokens", "lm_head"]},
    "tied-copies": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "tokens": {"trainable_token_indices": [3, 200, 202]},
    "tokens-of-both": {"trainable_token_indices": {"embed_tokens": [3, 200], "lm_head": [202, 9]}},
    "ends": {"target_modules": [*TARGETS, "embed_tokens", "lm_head"]},
    "head": {"target_modules": [*TARGETS, "lm_head"]},
    "tied-head": {"target_modules": [*TARGETS, "lm_head"], "ensure_weight_tying": True},
    "tied-embedding": {"target_modules": [*TARGETS, "embed_tokens"], "ensure_weight_tying": True},
}
SAMPLING = SamplingParams(max_tokens=NUM_NEW_TOKENS, temperature=0, ignore_eos=True, logprobs=0)

_models: Any = AutoModelForCausalLM


def resized(folder: Path, seed: int) -> Any:
    model = _models.from_pretrained(folder, dtype=torch.float32)
    torch.manual_seed(seed)
    model.resize_token_embeddings(RESIZED, mean_resizing=False)
    return model


def save_trained(model: Any, form: dict[str, Any], folder: Path) -> None:
    trained = get_peft_model(
        model, LoraConfig(**({"r": 4, "lora_alpha": 6, "target_modules": TARGETS} | form))
    )
    with torch.no_grad():
        for parameter in trained.parameters():
            if parameter.requires_grad:
                parameter.add_(0.15 * torch.randn_like(parameter))
    trained.save_pretrained(folder)


@torch.no_grad()
def reference(base: Path, adapter: Path) -> tuple[list[int], torch.Tensor]:
    """Return PEFT's tokens, and their log probabilities."""
    model: Any = PeftModel.from_pretrained(_models.from_pretrained(base), adapter).eval()
    output = model.generate(
        input_ids=torch.tensor([PROMPT]),
        max_new_tokens=NUM_NEW_TOKENS,
        do_sample=False,
        pad_token_id=0,
    )
    logprobs = model(output).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
    tokens = output[0, len(PROMPT) :]
    return tokens.tolist(), logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1)


class Case:
    """Original base, adapters that were trained on it after a resize, and a resized base."""

    def __init__(self, folder: Path, *, is_tied: bool, has_same_rows: bool) -> None:
        self.original, self.base = folder / "original", folder / "base"
        sizes = tiny_sizes(VOCAB_SIZE, tie_word_embeddings=is_tied)
        save_random_model(self.original, LlamaConfig(**sizes))
        resized(self.original, 1 if has_same_rows else 2).save_pretrained(self.base)
        for place in (self.original, self.base):
            for name in ("tokenizer.json", "tokenizer_config.json"):
                shutil.copy(BASE_PATH / name, place)
        self.adapters = {name: folder / "adapters" / name for name in FORMS}
        for name, form in FORMS.items():
            save_trained(resized(self.original, 1), form, self.adapters[name])

    def stage(self, name: str, base: Path) -> StagedAdapter:
        return stage(
            StageRequest(
                request_id=1,
                path=str(self.adapters[name]),
                state_dir=str(base / "state"),
                shapes=base_shapes(read_config(base)),
                base_path=str(base),
            )
        )


BASES = {
    f"{tie}-{rows}-rows": (tie == "tied", rows == "same")
    for tie in ("tied", "untied")
    for rows in ("same", "other")
}


@pytest.fixture(
    scope="module",
    params=quick_and_slow(
        ("tied-other-rows",), ("tied-same-rows", "untied-same-rows", "untied-other-rows")
    ),
)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    is_tied, has_same_rows = BASES[request.param]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folder = tmp_path_factory.mktemp("resized")
        return Case(folder, is_tied=is_tied, has_same_rows=has_same_rows)


def test_peft_saved_more_than_it_trained(case: Case) -> None:
    """Else the rest would show nothing."""
    for name, folder in case.adapters.items():
        tensors = load_file(folder / "adapter_model.safetensors")
        assert any(tensor.shape[0] == RESIZED for tensor in tensors.values()), name


def test_every_form_is_served_as_by_peft(case: Case) -> None:
    adapters = {name: str(folder) for name, folder in case.adapters.items()}
    with LLM(str(case.base), adapters, state_dir=str(case.base / "state")) as llm:
        found = llm.generate([PROMPT] * len(FORMS), SAMPLING, adapter=list(FORMS))
    for (name, folder), completion in zip(case.adapters.items(), found, strict=True):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            token_ids, logprobs = reference(case.base, folder)
        own = torch.tensor([token.logprob for token in completion.logprobs])
        assert list(completion.token_ids) == token_ids, name
        assert float((own - logprobs).abs().max()) < TOLERANCE, name


def test_the_error_on_the_original_base_has_both_sizes(case: Case) -> None:
    for name in FORMS:
        with pytest.raises(AdapterMismatchError, match=f"{RESIZED}.*{VOCAB_SIZE}") as caught:
            case.stage(name, case.original)
        assert "resize" in caught.value.message.lower(), name
