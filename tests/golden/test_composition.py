"""Several adapters in a request, against PEFT.

LoRA against add_weighted_adapter, which concatenates ranks; everything else against the base plus
the weighted sum of what each adapter changes of the weights once PEFT has merged it.
"""

import shutil
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig

from loraplex import LLM, SamplingParams
from loraplex.core.errors import AdapterNotFoundError, UnsupportedFeatureError
from loraplex.demo import BASE_PATH
from loraplex.execution import loading
from loraplex.kernels.reference import ReferenceKernels
from loraplex.serving.compare import ComparedOutput
from support.checkpoints import save_random_model, tiny_sizes

NUM_NEW_TOKENS = 8
TOLERANCE = 1e-4
SIZES = tiny_sizes(
    199, hidden_size=32, intermediate_size=56, head_dim=8, max_position_embeddings=64
)
CONFIG = LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True)
ATTENTION = ["q_proj", "v_proj", "o_proj"]
LORA: dict[str, dict[str, Any]] = {
    "attention": {"r": 4, "lora_alpha": 8, "target_modules": ATTENTION},
    "all": {"r": 7, "lora_alpha": 3, "use_rslora": True, "target_modules": "all-linear"},
    "pattern": {
        "r": 2,
        "lora_alpha": 6,
        "target_modules": ["k_proj", "up_proj", "down_proj"],
        "rank_pattern": {"up_proj": 5},
        "alpha_pattern": {"k_proj": 1},
    },
    "layer": {"r": 3, "lora_alpha": 6, "target_modules": ["q_proj"], "layers_to_transform": [1]},
}
OTHERS: dict[str, dict[str, Any]] = {
    "dora": {"r": 4, "lora_alpha": 6, "target_modules": "all-linear", "use_dora": True},
    "dora-few": {"r": 2, "lora_alpha": 6, "target_modules": ATTENTION, "use_dora": True},
    "bias": {"r": 4, "lora_alpha": 6, "target_modules": ATTENTION, "bias": "all"},
    "lora-bias": {"r": 3, "lora_alpha": 6, "target_modules": ATTENTION, "lora_bias": True},
    "head": {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "lm_head"]},
    "head-too": {"r": 2, "lora_alpha": 6, "target_modules": ["lm_head"]},
    "embedding": {"r": 4, "lora_alpha": 6, "target_modules": ["v_proj", "embed_tokens"]},
    "embedding-too": {"r": 2, "lora_alpha": 6, "target_modules": ["embed_tokens"]},
    "copy": {"r": 4, "target_modules": ATTENTION, "modules_to_save": ["lm_head"]},
    "copies": {
        "r": 4,
        "target_modules": ["q_proj"],
        "modules_to_save": ["lm_head", "embed_tokens"],
    },
    "tokens": {"r": 4, "target_modules": ATTENTION, "trainable_token_indices": [3, 190, 17]},
}
CONCATENATED: tuple[dict[str, float], ...] = (
    {"attention": 0.7, "pattern": 0.3},
    {"attention": 1.0, "all": 1.0},
    {"attention": -1.0, "all": 0.5},
    {"attention": 0.5, "all": -0.25, "pattern": 2.0},
    {"attention": 1.0, "all": 0.5, "pattern": -1.0, "layer": 1.5},
    {"attention": 0.0, "all": 0.5},
    {"attention": 0.0, "pattern": 0.0},
)
MERGED: tuple[dict[str, float], ...] = (
    {"dora": 1.0, "attention": 0.5},
    {"dora": 0.6, "dora-few": -0.4},
    {"dora-few": 1.0, "bias": 0.5, "all": 0.25},
    {"bias": 0.5, "lora-bias": 0.5},
    {"head": 0.5, "head-too": -0.5},
    {"embedding": 0.5, "embedding-too": 1.0, "head": 1.0},
    {"copy": 0.5, "embedding": 0.5, "attention": 1.0},
    {"copies": 1.0, "all": 0.5, "dora-few": 0.5},
    {"tokens": 1.0, "head": 0.5, "pattern": -0.5},
)
COMPOSITIONS = (*CONCATENATED, *MERGED)
REFUSED = (
    ("copy", "copies", "lm_head"),
    ("copy", "head", "lm_head"),
    ("tokens", "embedding", "embed_tokens"),
    ("embedding", "copies", "embed_tokens"),
)
PROMPTS = [[3, 9, 17, 190, 5, 7, 60], [11, 2, 3, 150]]
SAMPLING = SamplingParams(max_tokens=NUM_NEW_TOKENS, temperature=0, ignore_eos=True, logprobs=0)


@dataclass(frozen=True)
class Completion:
    token_ids: tuple[int, ...]
    logprobs: torch.Tensor
    """Log probabilities of the tokens."""


@dataclass(frozen=True)
class Case:
    folder: Path
    expected: list[list[Completion]]
    """Completions by composition, then by prompt."""
    base: list[Completion]

    def open(self, **settings: Any) -> LLM:
        adapters = {name: str(self.folder / "adapters" / name) for name in (*LORA, *OTHERS)}
        return LLM(str(self.folder), adapters, state_dir=str(self.folder / "state"), **settings)


def fresh_base(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def reference(model: Any, prompt: list[int]) -> Completion:
    ids = torch.tensor([prompt])
    output = model.generate(
        input_ids=ids, max_new_tokens=NUM_NEW_TOKENS, do_sample=False, pad_token_id=0
    )
    new = output[0, len(prompt) :]
    logits = model(output).logits[0, len(prompt) - 1 : -1]
    logprobs = logits.log_softmax(-1).gather(1, new.unsqueeze(1)).squeeze(1)
    return Completion(tuple(new.tolist()), logprobs)


def train(folder: Path, name: str, config: Mapping[str, Any], seed: int) -> None:
    torch.manual_seed(seed)
    model = get_peft_model(fresh_base(folder), LoraConfig(**config))
    for parameter_name, parameter in model.named_parameters():
        if parameter.requires_grad:
            noise = 0.15 * torch.randn_like(parameter)
            is_magnitude = "magnitude" in parameter_name
            parameter.copy_(parameter * (1 + noise) if is_magnitude else parameter + noise)
    model.save_pretrained(folder / "adapters" / name)


def concatenated(folder: Path) -> list[list[Completion]]:
    first, *others = LORA
    model = PeftModel.from_pretrained(fresh_base(folder), folder / "adapters" / first, first)
    for name in others:
        model.load_adapter(folder / "adapters" / name, name)
    completions = []
    for index, scales in enumerate(CONCATENATED):
        model.add_weighted_adapter(list(scales), list(scales.values()), f"c{index}", "cat")
        model.set_adapter(f"c{index}")
        completions.append([reference(model.eval(), prompt) for prompt in PROMPTS])
    return completions


def merged(folder: Path) -> list[list[Completion]]:
    base = fresh_base(folder).state_dict()
    changes: dict[str, dict[str, torch.Tensor]] = {}
    for name in {name: None for scales in MERGED for name in scales}:
        model = PeftModel.from_pretrained(fresh_base(folder), folder / "adapters" / name)
        state = model.merge_and_unload().state_dict()
        changes[name] = {key: state[key].double() - base[key].double() for key in base}
    completions = []
    for scales in MERGED:
        model = fresh_base(folder)
        model.load_state_dict(
            {
                key: weight.double() + sum(t * changes[name][key] for name, t in scales.items())
                for key, weight in base.items()
            }
        )
        completions.append([reference(model.eval(), prompt) for prompt in PROMPTS])
    return completions


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("composition")
    base = save_random_model(folder, CONFIG)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BASE_PATH / name, folder)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        for seed, (name, config) in enumerate((LORA | OTHERS).items()):
            train(folder, name, config, seed)
        expected = [*concatenated(folder), *merged(folder)]
        return Case(folder, expected, [reference(base, prompt) for prompt in PROMPTS])


def check(found: Any, want: Completion, of: object) -> None:
    logprobs = torch.tensor([token.logprob for token in found.logprobs])
    torch.testing.assert_close(
        logprobs, want.logprobs, rtol=0, atol=TOLERANCE, msg=lambda text: f"{of}: {text}"
    )
    assert found.token_ids == want.token_ids, of


def test_compositions_matter(case: Case) -> None:
    """Else the rest would show nothing; only what has scale 0 alone is the base."""
    for scales, completions in zip(COMPOSITIONS, case.expected, strict=True):
        difference = (completions[0].logprobs[0] - case.base[0].logprobs[0]).abs()
        assert (float(difference) > 10 * TOLERANCE) == any(scales.values()), scales


@pytest.mark.parametrize("kernels", ["fastest", "reference"])
def test_all_in_one_batch(case: Case, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compositions in one batch with the base and single adapters."""
    if kernels == "reference":
        monkeypatch.setattr(
            loading, "select_kernels", lambda device, *_, **__: ReferenceKernels(device)
        )
    alone = ["attention", "dora", None]
    requested = [*COMPOSITIONS, *alone]
    with case.open() as llm:
        apart = [llm.generate(PROMPTS[0], SAMPLING, adapter=name)[0].token_ids for name in alone]
        for index, prompt in enumerate(PROMPTS):
            completions = llm.generate([prompt] * len(requested), SAMPLING, adapter=requested)
            for scales, want, found in zip(COMPOSITIONS, case.expected, completions, strict=False):
                check(found, want[index], scales)
            if index == 0:
                assert [completion.token_ids for completion in completions[-len(alone) :]] == apart


def test_each_alone_and_its_names(case: Case) -> None:
    with case.open() as llm:
        for scales, want in zip(COMPOSITIONS, case.expected, strict=True):
            [found] = llm.generate(PROMPTS[1], SAMPLING, adapter=scales)
            check(found, want[1], scales)
            assert [(a.name, a.scale) for a in found.adapters] == list(scales.items())


def test_the_order_changes_nothing_and_a_scale_does(case: Case) -> None:
    """Bit for bit, and the blocks are shared; those of other scales never are."""
    prompt = list(range(40, 80))
    one, other = {"attention": 0.7, "all": 0.3}, {"all": 0.3, "attention": 0.7}
    with case.open() as llm:
        first = llm.generate(prompt, SAMPLING, adapter=one)[0]
        again = llm.generate(prompt, SAMPLING, adapter=other)[0]
        assert again.completions[0].logprobs == first.completions[0].logprobs
        assert (first.timing.num_cached_tokens, again.timing.num_cached_tokens) == (0, 32)
        strangers: list[Any] = [
            {"attention": 0.3, "all": 0.7},
            {"attention": 0.7, "all": -0.3},
            {"attention": -0.7, "all": 0.3},
            {"all": 0.3},
            {"attention": 0.7, "all": 0.3, "layer": 0.1},
            {"attention": 0.7},
            "attention",
            None,
        ]
        for stranger in strangers:
            completion = llm.generate(prompt, SAMPLING, adapter=stranger)[0]
            assert completion.timing.num_cached_tokens == 0, stranger
        base = llm.generate(prompt, SAMPLING, adapter={"attention": 0.0})[0]
        assert base.timing.num_cached_tokens == 32, "scale 0 is the base"


def test_one_content_under_two_names_adds_up(case: Case) -> None:
    with case.open() as llm:
        llm.alias_adapter("attention", "too")
        [twice] = llm.generate(PROMPTS[0], SAMPLING, adapter={"attention": 0.75, "too": 0.25})
        [once] = llm.generate(PROMPTS[0], SAMPLING, adapter="attention")
        assert twice.logprobs == once.logprobs
        [none] = llm.generate(PROMPTS[0], SAMPLING, adapter={"attention": 0.5, "too": -0.5})
        check(none, case.base[0], "cancelled")


def test_a_fused_batch_of_chunks(case: Case) -> None:
    """Cut prompts and a pool that holds few adapters at a time."""
    with case.open(max_num_batched_tokens=5, max_num_seqs=3) as llm:
        for index, prompt in enumerate(PROMPTS):
            requested = list(COMPOSITIONS)
            completions = llm.generate([prompt] * len(requested), SAMPLING, adapter=requested)
            for scales, want, found in zip(COMPOSITIONS, case.expected, completions, strict=True):
                check(found, want[index], scales)


@pytest.mark.some(2)
@pytest.mark.parametrize(("name", "other", "module"), REFUSED)
def test_replaced_rows_have_no_sum(case: Case, name: str, other: str, module: str) -> None:
    with case.open() as llm:
        for scales in ({name: 0.5, other: 0.5}, {other: 0.5, name: 0.5}):
            with pytest.raises(UnsupportedFeatureError, match=f"rows of {module}"):
                llm.generate(PROMPTS[0], SAMPLING, adapter=scales)
        llm.generate(PROMPTS[0], SAMPLING, adapter={name: 0.5, other: 0.0})


def test_compare_finds_where_a_completion_leaves_the_base(case: Case) -> None:
    """The log probabilities of both models at that position are those of transformers."""
    scales = {"attention": 0.7, "pattern": 0.3}
    want, base = case.expected[COMPOSITIONS.index(scales)][0], case.base[0]
    with case.open() as llm:
        adapters = [scales, "no", None]
        mine, failed, its = llm.compare(PROMPTS[0], adapters, SAMPLING)
    assert isinstance(failed, AdapterNotFoundError)
    assert isinstance(mine, ComparedOutput)
    assert isinstance(its, ComparedOutput)
    check(mine, want, scales)
    check(its, base, "base")
    assert its.versus_base is None
    versus = mine.versus_base
    assert versus is not None
    assert versus.first is not None
    pairs = zip(want.token_ids, base.token_ids, strict=True)
    place = next(i for i, (one, other) in enumerate(pairs) if one != other)
    assert versus.num_same_tokens == versus.first.position == place
    assert versus.first.token_logprob == pytest.approx(float(want.logprobs[place]), abs=TOLERANCE)
    by_base = float(base.logprobs[place])
    assert versus.first.base_token_logprob_by_base == pytest.approx(by_base, abs=TOLERANCE)
    assert 0 < mine.ttft_ms <= mine.total_ms
