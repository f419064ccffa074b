"""Every trait of every model family against transformers and PEFT, with adapters on all linears.

Tiny checkpoints whose parameters, norms too, are all random: a norm of ones would hide its place.
"""

import dataclasses
import functools
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel

from loraplex.adapters.staged import StageRequest
from loraplex.adapters.staging_worker import stage
from loraplex.adapters.tensor_file import StagingLimits
from loraplex.app.builder import base_shapes
from loraplex.core.rank_limits import RankLimits
from loraplex.execution import loading
from loraplex.execution.adapters.host_adapters import HostAdapter
from loraplex.execution.adapters.loader import read_host_adapter
from loraplex.kernels.reference import ReferenceKernels
from loraplex.models.registry import read_config
from support.checkpoints import add_random_adapters
from support.families import convolutions, every, experts, hybrids, state_spaces
from support.families.case import VOCAB_SIZE, FamilyCase, parameters
from support.reference_completions import (
    RecordingSampler,
    recorded_driver,
    reference_completion,
    relative_error,
)
from support.step_driver import Prompt, StepDriver

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    # PEFT adds patterns for experts that some of its own targets lack.
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys"),
]

CASES = every.CASES
QUICK = [name for name, case in CASES.items() if case.is_quick]
RECURRENT = {**hybrids.CASES, **state_spaces.CASES, **convolutions.CASES}
RECURRENT_QUICK = ("granite-hybrid",)
LENGTHS = (1, 63, 64, 65, 130)
"""Tokens of prompts: a recurrence has a state every 64."""
NUM_NEW_TOKENS = 24
MAX_RANK = 16
RANK_LIMIT = 32
"""Adapters of separate q, k and v that a case fuses have the sum of their ranks."""
TOLERANCE = 1e-4
"""Relative to the largest logit."""
BFLOAT16_FACTOR = 1.5


def adapter_configs(case: FamilyCase) -> dict[str, LoraConfig]:
    some = case.linears
    return {
        "all": LoraConfig(
            r=8,
            lora_alpha=8,
            target_modules=case.all_targets,
            target_parameters=list(case.parameters) or None,
            rank_pattern={some[1]: 3, rf"1\.(?:.*\.)?{some[-1]}": MAX_RANK},
            alpha_pattern={some[1]: 5},
        ),
        "first": LoraConfig(r=4, lora_alpha=24, target_modules=case.targets(r"\d+", some[:1])),
        "one-layer": LoraConfig(r=1, lora_alpha=2, target_modules=case.targets("1", some[-2:])),
    }


@dataclasses.dataclass(frozen=True)
class Subject:
    """One checkpoint and its adapters in both implementations."""

    folder: Path
    reference: PeftModel
    adapters: Mapping[str, HostAdapter]

    @functools.cached_property
    def expected(self) -> dict[str | None, tuple[torch.Tensor, list[int]]]:
        """What the reference gives for PROMPTS, by adapter: its logits and its tokens."""
        return {
            adapter: reference_completion(self.reference, adapter, prompt, NUM_NEW_TOKENS)
            for adapter, prompt in PROMPTS.items()
        }

    def driver(
        self, *, scrambled: bool = False, **settings: Any
    ) -> tuple[StepDriver, RecordingSampler]:
        adapters = {HANDLES[name]: adapter for name, adapter in self.adapters.items()}
        ranks = {"max_lora_rank": RANK_LIMIT}
        return recorded_driver(self.folder, adapters, is_scrambled=scrambled, **(ranks | settings))


HANDLES = {
    "all": 11,
    "first": 12,
    "one-layer": 13,
    "embedding": 14,
    "head": 15,
    "all-linear": 16,
    "dora": 17,
}
ENDS = {
    "embedding": LoraConfig(r=4, lora_alpha=6, target_modules=["embed_tokens"]),
    "head": LoraConfig(r=4, lora_alpha=6, target_modules=["lm_head"]),
}


def make_subject(
    folder: Path, case: FamilyCase, configs: Mapping[str, LoraConfig] | None = None
) -> Subject:
    configs = configs or adapter_configs(case)
    reference = add_random_adapters(case.save(folder), configs)
    return Subject(
        folder, reference, {name: saved(folder, name, reference, case) for name in configs}
    )


def saved(folder: Path, name: str, reference: PeftModel, case: FamilyCase) -> HostAdapter:
    """Save an adapter, and read it as a server does."""
    adapters = folder / "adapters"
    reference.save_pretrained(adapters, selected_adapters=[name])
    if case.convert is not None:
        case.convert(adapters / name)
    request = StageRequest(
        request_id=1,
        path=str(adapters / name),
        state_dir=str(folder / "state"),
        shapes=base_shapes(read_config(folder)),
        limits=StagingLimits(max_ranks=RankLimits(RANK_LIMIT)),
        base_path=str(folder),
    )
    return read_host_adapter(stage(request).source)


@pytest.fixture(scope="module")
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return make_subject(tmp_path_factory.mktemp("model"), CASES[request.param])


@pytest.fixture
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What this machine would choose, or torch alone: both must be right."""
    if request.param == "reference":
        monkeypatch.setattr(
            loading, "select_kernels", lambda device, *_, **__: ReferenceKernels(device)
        )


def all_cases(*, is_of_families: bool = False) -> Callable[..., Any]:
    """Run a test with all cases; `make test` runs some quick ones.

    On torch alone CI runs the quick ones, which have each family once, and `make soak` the others.
    is_of_families: the same on the kernels, for what `test_family_schedules` tests by trait.
    """
    slow, soak = pytest.mark.slow, pytest.mark.soak
    others = soak if is_of_families else slow
    cases = [
        *(pytest.param(name, "fastest", marks=() if name in QUICK else others) for name in CASES),
        *(pytest.param(name, "reference", marks=slow if name in QUICK else soak) for name in CASES),
    ]

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        test = pytest.mark.parametrize(("subject", "backend"), cases, indirect=True)(test)
        return pytest.mark.some(14)(pytest.mark.usefixtures("backend")(test))

    return decorate


def make_prompt(length: int, adapter: str | None) -> Prompt:
    rng = random.Random(length)
    tokens = tuple(rng.randrange(VOCAB_SIZE) for _ in range(length))
    return Prompt(tokens, ((HANDLES[adapter], 1.0),) if adapter else ())


# Longer than the windows, and than the original length of stretched ropes.
PROMPTS = {
    None: make_prompt(23, None),
    "all": make_prompt(31, "all"),
    "first": make_prompt(20, "first"),
    "one-layer": make_prompt(27, "one-layer"),
}


@all_cases()
def test_same_logits_and_tokens_as_transformers(subject: Subject) -> None:
    driver, sampler = subject.driver()
    for adapter, (logits, tokens) in subject.expected.items():
        sampler.logits.clear()
        (generated,) = driver.generate([PROMPTS[adapter]], NUM_NEW_TOKENS, prompt_logits=True)
        assert relative_error(sampler.logits[0], logits) < TOLERANCE, adapter
        assert generated == tokens, adapter


@all_cases(is_of_families=True)
def test_same_bits_in_company_in_chunks_and_in_other_blocks(subject: Subject) -> None:
    prompts = list(PROMPTS.values())
    driver, sampler = subject.driver()
    alone, last_logits = [], []
    for prompt in prompts:
        alone += driver.generate([prompt], NUM_NEW_TOKENS)
        last_logits.append(sampler.logits[-1])
    driver, sampler = subject.driver(scrambled=True)
    assert driver.generate(prompts, NUM_NEW_TOKENS) == alone
    assert torch.equal(sampler.logits[-1], torch.cat(last_logits))
    for chunk_size in (1, 7, 19):
        assert driver.generate(prompts[::-1], NUM_NEW_TOKENS, chunk_size=chunk_size) == alone[::-1]


@pytest.mark.parametrize("subject", parameters(RECURRENT, RECURRENT_QUICK), indirect=True)
def test_prompts_around_the_borders_of_states(subject: Subject) -> None:
    """Compare with transformers, and the bits of chunks, of prompts as long as what states end."""
    prompts = [
        make_prompt(length, name)
        for length, name in zip(LENGTHS, (None, *subject.adapters, "all"), strict=True)
    ]
    driver, sampler = subject.driver(num_blocks=120)
    alone = []
    for prompt, name in zip(prompts, (None, *subject.adapters, "all"), strict=True):
        logits, tokens = reference_completion(subject.reference, name, prompt, 24)
        sampler.logits.clear()
        alone += driver.generate([prompt], 24, prompt_logits=True)
        assert relative_error(sampler.logits[0], logits) < TOLERANCE, len(prompt.token_ids)
        assert alone[-1] == tokens, len(prompt.token_ids)
    driver, _ = subject.driver(scrambled=True, num_blocks=120)
    for chunk_size in (1, 2, 3, 64, None):
        assert driver.generate(prompts, 24, chunk_size=chunk_size) == alone, chunk_size


@all_cases()
def test_adapters_change_the_logits(subject: Subject) -> None:
    """Or the other tests would prove nothing about them."""
    tokens = PROMPTS["all"].token_ids
    handles = [HANDLES[name] for name in subject.adapters]
    prompts = [Prompt(tokens), *(Prompt(tokens, ((h, 1.0),)) for h in handles)]
    driver, sampler = subject.driver()
    driver.generate(prompts, 1)
    base, *adapted = sampler.logits[-1]
    for logits in adapted:
        assert relative_error(logits, base) > 10 * TOLERANCE


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`", "ignore:Model.*tie_word")
@pytest.mark.parametrize("name", ["gemma2", "granite"])
def test_adapters_of_embedding_and_head(name: str, tmp_path: Path) -> None:
    """Compare with factors of the embedding and the logits, and with a soft cap of these."""
    subject = make_subject(tmp_path, CASES[name], ENDS)
    driver, sampler = subject.driver(lora_device_bytes=8 << 20)
    for adapter in ENDS:
        prompt = make_prompt(20, adapter)
        logits, tokens = reference_completion(subject.reference, adapter, prompt, 4)
        sampler.logits.clear()
        assert driver.generate([prompt], 4, prompt_logits=True) == [tokens]
        assert relative_error(sampler.logits[0], logits) < TOLERANCE, adapter


OUTER = "per_layer_model_projection"
OF_LAYER_INPUTS = {
    "all-linear": LoraConfig(r=4, lora_alpha=6, target_modules="all-linear"),
    "dora": LoraConfig(r=4, lora_alpha=6, target_modules=[OUTER, "up_proj"], use_dora=True),
    "first": LoraConfig(r=8, lora_alpha=24, target_modules=[OUTER]),
}


@pytest.mark.filterwarnings("ignore:.*left out")
def test_adapters_of_what_makes_the_own_inputs_of_layers(tmp_path: Path) -> None:
    """Compare LoRA and DoRA of a projection outside the layers, alone and in company."""
    subject = make_subject(tmp_path, CASES["gemma4"], OF_LAYER_INPUTS)
    driver, sampler = subject.driver()
    prompts = [make_prompt(20, name) for name in (*OF_LAYER_INPUTS, None)]
    alone, last_logits = [], []
    for prompt, name in zip(prompts, (*OF_LAYER_INPUTS, None), strict=True):
        logits, tokens = reference_completion(subject.reference, name, prompt, 4)
        sampler.logits.clear()
        alone += driver.generate([prompt], 4, prompt_logits=True)
        assert relative_error(sampler.logits[0], logits) < TOLERANCE, name
        assert alone[-1] == tokens, name
        last_logits.append(sampler.logits[-1])
    driver, sampler = subject.driver(scrambled=True)
    assert driver.generate(prompts, 4) == alone
    assert torch.equal(sampler.logits[-1], torch.cat(last_logits))


def mean_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the root of the mean square, relative to the expected values'."""
    assert actual.shape == expected.shape
    return float((actual.float() - expected).norm() / expected.norm())


def median_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the error of the median token: rounding may give others another expert."""
    assert actual.shape == expected.shape
    errors = (actual.float() - expected).norm(dim=1) / expected.norm(dim=1)
    return float(errors.median())


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_bfloat16_is_as_exact_as_transformers(name: str, tmp_path: Path) -> None:
    """Compare the mean: the largest error of so few logits is a matter of luck, for both."""
    subject = make_subject(tmp_path, CASES[name])
    error = median_error if name in experts.CASES else mean_error
    exact = {
        adapter: reference_completion(subject.reference, adapter, prompt, 1)[0]
        for adapter, prompt in PROMPTS.items()
    }
    driver, sampler = subject.driver(dtype="bfloat16")
    half = subject.reference.to(torch.bfloat16)
    own_error = their_error = 0.0
    for adapter, prompt in PROMPTS.items():
        logits, _ = reference_completion(half, adapter, prompt, 1)
        sampler.logits.clear()
        driver.generate([prompt], 1, prompt_logits=True)
        own_error += error(sampler.logits[0], exact[adapter])
        their_error += error(logits, exact[adapter])
    assert own_error < BFLOAT16_FACTOR * their_error


BORDER_LENGTHS = (1, 63, 64, 65, 130)
"""Prompts that end before, at and after the borders of states; most others end before the first."""
NUM_BORDER_TOKENS = 24
WITH_STATES = [
    pytest.param("qwen3.5", "fastest"),
    *(
        pytest.param(name, "fastest", marks=pytest.mark.slow)
        for name in ("qwen3.5-three-values", "qwen3.5-equal-heads", "qwen3.5-moe", "qwen3-next")
    ),
    pytest.param("qwen3.5", "reference", marks=pytest.mark.slow),
]


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(("subject", "backend"), WITH_STATES, indirect=True)
def test_borders_of_states(subject: Subject) -> None:
    driver, sampler = subject.driver()
    for length in BORDER_LENGTHS:
        for adapter in (None, "all"):
            prompt = make_prompt(length, adapter)
            logits, tokens = reference_completion(
                subject.reference, adapter, prompt, NUM_BORDER_TOKENS
            )
            sampler.logits.clear()
            (generated,) = driver.generate([prompt], NUM_BORDER_TOKENS, prompt_logits=True)
            assert relative_error(sampler.logits[0], logits) < TOLERANCE, (length, adapter)
            assert generated == tokens, (length, adapter)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(("subject", "backend"), WITH_STATES, indirect=True)
def test_bits_at_borders_of_states(subject: Subject) -> None:
    prompts = [make_prompt(n, name) for n in BORDER_LENGTHS for name in (None, "all")][2:]
    driver, sampler = subject.driver()
    alone, last_logits = [], []
    for prompt in prompts:
        alone += driver.generate([prompt], NUM_BORDER_TOKENS)
        last_logits.append(sampler.logits[-1])
    driver, sampler = subject.driver(scrambled=True, num_blocks=200)
    assert driver.generate(prompts, NUM_BORDER_TOKENS) == alone
    assert torch.equal(sampler.logits[-1], torch.cat(last_logits))
    for chunk_size in (1, 2, 3, 50):
        assert driver.generate(prompts, NUM_BORDER_TOKENS, chunk_size=chunk_size) == alone
