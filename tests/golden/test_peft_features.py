"""Every feature of PEFT's LoRA against transformers and PEFT: tokens and logits, in four families.

An adapter is trained (every trainable parameter random), saved and loaded again by PEFT itself on a
fresh base: its output is then expected of the server, alone and in a mixed batch.
"""

import copy
import dataclasses
import shutil
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from loraplex import LLM, SamplingParams
from loraplex.adapters.canonical import CanonicalFile, CanonicalRow, RowKind, digest, read_canonical
from loraplex.adapters.formats.export import lora_tensors
from loraplex.adapters.formats.storage_type import StorageType
from loraplex.adapters.formats.trtllm import canonical_rows
from loraplex.adapters.staged import StagedAdapter, StageRequest
from loraplex.adapters.staging_worker import stage
from loraplex.adapters.targets import source_of
from loraplex.adapters.tensor_file import RawTensor, StagingLimits
from loraplex.app.builder import base_shapes
from loraplex.compat.convert.adapters import write_peft
from loraplex.core.rank_limits import RankLimits
from loraplex.core.weight_precision import WeightPrecision
from loraplex.demo import BASE_PATH
from loraplex.execution import loading
from loraplex.execution.adapters.host_adapters import HostAdapter
from loraplex.execution.adapters.loader import host_adapter, read_host_adapter
from loraplex.execution.sizing.settings import RunnerSettings
from loraplex.kernels.reference import ReferenceKernels
from loraplex.models.registry import read_config
from support.checkpoints import save_random_model, tiny_sizes
from support.examples import quick_and_slow
from support.rank_threads import RankThreads
from support.rounded_weights import rounded, rounded_inputs
from support.step_driver import Prompt, StepDriver

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_NEW_TOKENS = 6
MAX_RANK = 8
VOCAB_SIZE = 199
TOLERANCE = 1e-4
ROUNDED_TOLERANCE = 5e-2
"""Inputs are rounded to 8 bits: a sum that differs in its last bit may become the next number."""
HALF_TOLERANCES = {"float16": 1e-2, "bfloat16": 6e-2}
"""Relative to the largest logit."""

SIZES = tiny_sizes(
    VOCAB_SIZE, hidden_size=32, intermediate_size=56, head_dim=8, max_position_embeddings=64
)
FAMILIES: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "mistral": MistralConfig(**SIZES),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, tie_word_embeddings=True),
}
ATTENTION = ["q_proj", "v_proj", "o_proj"]
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {"target_modules": ATTENTION},
    "patterns": {
        "target_modules": ["q_proj", "k_proj", "up_proj"],
        "rank_pattern": {"k_proj": 2, r"layers\.1\.mlp\.up_proj": 6},
        "alpha_pattern": {"q_proj": 16, "layers.0.self_attn.q_proj": 2},
        "use_rslora": True,
    },
    "layers": {
        "target_modules": ["q_proj", "down_proj"],
        "layers_to_transform": [1],
        "layers_pattern": "layers",
    },
    "exclude": {"target_modules": ATTENTION, "exclude_modules": ["v_proj"]},
    "exclude-regex": {"target_modules": ATTENTION, "exclude_modules": r".*layers\.0\..*"},
    "regex": {"target_modules": r".*\.(q|k|gate)_proj"},
    "all-linear": {"target_modules": "all-linear"},
    "fan-in-fan-out": {"target_modules": ATTENTION, "fan_in_fan_out": True},
    "bias-all": {"target_modules": ATTENTION, "bias": "all"},
    "bias-lora-only": {"target_modules": ATTENTION, "bias": "lora_only"},
    "lora-bias": {"target_modules": "all-linear", "lora_bias": True},
    "dora": {"target_modules": "all-linear", "use_dora": True},
    "dora-bias": {"target_modules": ["q_proj", "down_proj"], "use_dora": True, "bias": "all"},
    "dora-head": {"target_modules": ["q_proj", "lm_head"], "use_dora": True},
    "head": {"target_modules": ["q_proj", "lm_head"]},
    "head-bias": {"target_modules": ["lm_head"], "lora_bias": True},
    "embedding": {"target_modules": ["v_proj", "embed_tokens"]},
    "ends": {"target_modules": ["embed_tokens", "lm_head"]},
    "ends-tied": {"target_modules": ["embed_tokens", "q_proj"], "ensure_weight_tying": True},
    "copies": {"target_modules": ATTENTION, "modules_to_save": ["lm_head", "embed_tokens"]},
    "copy-of-embedding": {"target_modules": ATTENTION, "modules_to_save": ["embed_tokens"]},
    "copy-of-head": {"target_modules": ATTENTION, "modules_to_save": ["lm_head"]},
    "tokens": {"target_modules": ATTENTION, "trainable_token_indices": [3, 190, 17]},
    "tokens-of-both": {
        "target_modules": ATTENTION,
        "trainable_token_indices": {"embed_tokens": [3, 5], "lm_head": [7, 2, 11]},
    },
    "gaussian": {"target_modules": ATTENTION, "init_lora_weights": "gaussian"},
    "ends-of-another-base": {"target_modules": ["embed_tokens", "lm_head"]},
}
IN_LAYERS = ("plain", "all-linear", "lora-bias", "bias-all", "dora", "dora-bias", "tokens")
"""Features that leave lm_head as it is."""
SAMPLING = SamplingParams(max_tokens=NUM_NEW_TOKENS, temperature=0, ignore_eos=True, logprobs=0)
PROMPTS = [[3, 9, 17, 190, 5, 7, 60], [11, 2, 3, 150]]


@dataclass(frozen=True)
class Completion:
    token_ids: tuple[int, ...]
    logits: torch.Tensor
    """[tokens, vocab]: what each of the tokens was drawn from."""

    @property
    def logprobs(self) -> torch.Tensor:
        chosen = torch.tensor(self.token_ids).unsqueeze(1)
        return self.logits.log_softmax(-1).gather(1, chosen).squeeze(1)


@dataclass(frozen=True)
class Case:
    folder: Path
    base: Any
    expected: dict[str | None, list[Completion]]
    """Completions by adapter, one for each prompt."""

    def adapter(self, name: str) -> Path:
        return self.folder / "adapters" / name

    def open(self, names: Iterable[str], **settings: Any) -> LLM:
        adapters = {name: str(self.adapter(name)) for name in names}
        return LLM(str(self.folder), adapters, state_dir=str(self.folder / "state"), **settings)

    def stage(self, path: Path) -> StagedAdapter:
        return stage(
            StageRequest(
                request_id=1,
                path=str(path),
                state_dir=str(self.folder / "state"),
                shapes=base_shapes(read_config(self.folder)),
                limits=StagingLimits(max_ranks=RankLimits(MAX_RANK)),
                base_path=str(self.folder),
            )
        )

    def rows(self, name: str) -> tuple[CanonicalRow, ...]:
        return read_canonical(Path(self.stage(self.adapter(name)).source.path)).rows


def train(model: PeftModel) -> None:
    """Every trainable parameter near its beginning, none the same as the base's."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            noise = 0.15 * torch.randn_like(parameter)
            parameter.copy_(parameter * (1 + noise) if "magnitude" in name else parameter + noise)


def save(model: PeftModel, folder: Path, *, moves_base: bool) -> None:
    """moves_base: the copies of the base's weights that PEFT saves are another base's."""
    model.save_pretrained(folder)
    path = folder / "adapter_model.safetensors"
    if moves_base:
        tensors = load_file(path)
        for name in [name for name in tensors if name.endswith("base_layer.weight")]:
            noise = torch.randn(tensors[name].shape, generator=torch.Generator().manual_seed(1))
            tensors[name] = tensors[name] + 0.1 * noise
        save_file(tensors, path, {"format": "pt"})


@torch.no_grad()
def load_peft(base: Any, folder: Path) -> PeftModel:
    """Load the adapter onto a copy of the base."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return PeftModel.from_pretrained(copy.deepcopy(base), folder).eval()


@torch.no_grad()
def reference(model: Any, prompt: list[int]) -> Completion:
    output = model.generate(
        input_ids=torch.tensor([prompt]),
        max_new_tokens=NUM_NEW_TOKENS,
        do_sample=False,
        pad_token_id=0,
    )
    logits = model(output).logits[0, len(prompt) - 1 : -1]
    return Completion(tuple(output[0, len(prompt) :].tolist()), logits)


@pytest.fixture(scope="module", params=quick_and_slow(("llama",), ("qwen2", "mistral", "qwen3")))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp(request.param)
    base = save_random_model(folder, FAMILIES[request.param])
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BASE_PATH / name, folder)
    expected: dict[str | None, list[Completion]] = {}
    expected[None] = [reference(base, prompt) for prompt in PROMPTS]
    for index, (name, feature) in enumerate(FEATURES.items()):
        torch.manual_seed(index)
        place = folder / "adapters" / name
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = LoraConfig(r=4, lora_alpha=6, **feature)
            model = get_peft_model(copy.deepcopy(base), config)
            train(model)
            save(model, place, moves_base=name == "ends-of-another-base")
        loaded = load_peft(base, place)
        expected[name] = [reference(loaded, prompt) for prompt in PROMPTS]
    return Case(folder, base, expected)


def check(case: Case, names: list[str | None], completions: list[Any], prompts: list[int]) -> None:
    for name, prompt, completion in zip(names, prompts, completions, strict=True):
        want = case.expected[name][prompt]
        found = torch.tensor([token.logprob for token in completion.logprobs])
        error = float((found - want.logprobs).abs().max())
        assert error < TOLERANCE, name
        assert completion.token_ids == want.token_ids, name


class Computed:
    """The logits of adapters, from a runner that is driven by hand."""

    def __init__(self, case: Case, num_ranks: int = 1, **settings: Any) -> None:
        self._case = case
        fixed = {"num_blocks": 400, "block_size": 8, "max_lora_rank": MAX_RANK}
        fixed |= {"lora_device_bytes": 16 << 20}
        self._ranks = RankThreads(case.folder, RunnerSettings(**(fixed | settings)), num_ranks)
        self._sampler = self._ranks.ranks[0].sampler
        self.runner = self._ranks.ranks[0].runner
        self._driver = StepDriver(self._ranks)
        self._handles: dict[str | None, int] = {}

    def load(self, name: str) -> None:
        self.put(name, read_host_adapter(self._case.stage(self._case.adapter(name)).source))

    def put(self, name: str, adapter: HostAdapter) -> None:
        handle = self._handles[name] = 1 + len(self._handles)
        self._ranks.put(handle, adapter)
        pages = self._ranks.pages_of(adapter)
        assert self._driver.load(handle, pages).copies_done == (handle,)

    def errors(self, names: Iterable[str | None], expected: dict | None = None) -> dict:
        """Return each adapter's largest error, relative to the largest logit, all in one batch."""
        expected = expected or self._case.expected
        names = [name for name in names for _ in PROMPTS]
        completions = [expected[name][i % len(PROMPTS)] for i, name in enumerate(names)]
        prompts = [
            Prompt(
                (*PROMPTS[i % len(PROMPTS)], *completion.token_ids[:-1]),
                ((self._handles[name], 1.0),) if name in self._handles else (),
            )
            for i, (name, completion) in enumerate(zip(names, completions, strict=True))
        ]
        self._sampler.logits.clear()
        self._driver.generate(prompts, 1, prompt_logits=True)
        (logits, *_) = self._sampler.logits
        found = logits.split([len(prompt.token_ids) for prompt in prompts])
        errors: dict[str | None, float] = {}
        for name, own, want in zip(names, found, completions, strict=True):
            difference = (own[-NUM_NEW_TOKENS:] - want.logits.float()).abs().max()
            error = float(difference / want.logits.abs().max())
            errors[name] = max(errors.get(name, 0.0), error)
        return errors


def too_large(errors: dict, tolerance: float) -> dict:
    return {name: error for name, error in errors.items() if not error < tolerance}


def test_features_matter(case: Case) -> None:
    """Else the rest would show nothing."""
    base = case.expected[None][0].logits[0]
    for name in FEATURES:
        difference = (case.expected[name][0].logits[0] - base).abs().max()
        assert difference > 100 * TOLERANCE * base.abs().max(), name


@pytest.mark.some(5)
@pytest.mark.parametrize(
    ("backend", "num_ranks"),
    [("fastest", 1), ("reference", 1), ("fastest", 2), ("reference", 2), ("fastest", 4)],
)
def test_whole_logits_together_and_alone(
    case: Case, backend: str, num_ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if backend == "reference":
        monkeypatch.setattr(
            loading,
            "select_kernels",
            lambda device, *_, channel=None, **__: ReferenceKernels(device, channel),
        )
    computed = Computed(case, num_ranks)
    for name in FEATURES:
        computed.load(name)
    assert not too_large(computed.errors([None, *FEATURES]), TOLERANCE)
    for name in FEATURES:
        assert not too_large(computed.errors([name]), TOLERANCE)


def test_all_in_one_batch(case: Case) -> None:
    names = [None, *FEATURES] * len(PROMPTS)
    prompts = [index for index in range(len(PROMPTS)) for _ in (None, *FEATURES)]
    with case.open(FEATURES) as llm:
        completions = llm.generate([PROMPTS[index] for index in prompts], SAMPLING, adapter=names)
        check(case, names, completions, prompts)


def test_dora_as_a_pair(case: Case) -> None:
    """Magnitudes divided by the norms, as in TensorRT-LLM's pair."""
    computed = Computed(case)
    rows = case.rows("dora")
    host = read_host_adapter(case.stage(case.adapter("dora")).source)
    factors = computed.runner.prepare_adapter(host).factors
    quotients = [
        dataclasses.replace(row, tensors={"factor": float32(factors[row.layer, row.module])})
        if row.kind is RowKind.MAGNITUDE
        else row
        for row in rows
    ]
    shapes = base_shapes(read_config(case.folder))
    read = canonical_rows(
        *lora_tensors(quotients, StorageType.FLOAT32), shapes, RankLimits(MAX_RANK)
    )
    source = source_of(digest(read), Path("pair"), read, shapes, RankLimits(MAX_RANK))
    computed.put("dora", host_adapter(CanonicalFile(source.digest, read), source.targets))
    assert not too_large(computed.errors(["dora"]), TOLERANCE)


def float32(values: torch.Tensor) -> RawTensor:
    return RawTensor("F32", tuple(values.shape), values.float().numpy().tobytes())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", HALF_TOLERANCES)
def test_pools_of_half_precision(case: Case, dtype: str) -> None:
    computed = Computed(case, dtype=dtype)
    for name in FEATURES:
        computed.load(name)
    assert not too_large(computed.errors([None, *FEATURES]), HALF_TOLERANCES[dtype])


@pytest.mark.slow
def test_a_base_that_is_packed_in_int8(case: Case) -> None:
    """The reference is PEFT on a base whose linear layers were rounded as ours are."""
    base = copy.deepcopy(case.base)
    if base.config.tie_word_embeddings:
        base.lm_head.weight = torch.nn.Parameter(base.lm_head.weight.detach().clone())
        base.config.tie_word_embeddings = False
    with torch.no_grad():
        for name, module in base.named_modules():
            if isinstance(module, torch.nn.Linear):
                module.weight.copy_(rounded(f"{name}.", module.weight, WeightPrecision.INT8))
    names = [
        name for name in IN_LAYERS if name != "tokens" or not case.base.config.tie_word_embeddings
    ]
    models: dict[str | None, Any] = {None: base}
    computed = Computed(case, quantization=WeightPrecision.INT8)
    for name in names:
        models[name] = load_peft(base, case.adapter(name))
        computed.load(name)
    expected: dict[str | None, list[Completion]] = {}
    for adapter, model in models.items():
        with rounded_inputs(
            {
                f"{name}.": module.weight
                for name, module in model.named_modules()
                if isinstance(module, torch.nn.Linear) and "lora_" not in name
            }
        ):
            expected[adapter] = [reference(model, prompt) for prompt in PROMPTS]
    assert not too_large(computed.errors([None, *names], expected), ROUNDED_TOLERANCE)


@pytest.mark.slow
def test_what_is_written_as_peft_is_read_by_peft_and_by_us(case: Case, tmp_path: Path) -> None:
    computed = Computed(case)
    for name in FEATURES:
        write_peft(case.rows(name), tmp_path / name)
        model = load_peft(case.base, tmp_path / name)
        for prompt, want in zip(PROMPTS, case.expected[name], strict=True):
            found = reference(model, prompt)
            torch.testing.assert_close(found.logits, want.logits, rtol=1e-5, atol=1e-5, msg=name)
        staged = case.stage(tmp_path / name)
        assert staged.source.digest == case.stage(case.adapter(name)).source.digest, name
        computed.put(name, read_host_adapter(staged.source))
    assert not too_large(computed.errors(FEATURES), TOLERANCE)


@pytest.mark.slow
def test_alone(case: Case) -> None:
    with case.open(FEATURES) as llm:
        for name in FEATURES:
            check(case, [name], llm.generate([PROMPTS[0]], SAMPLING, adapter=[name]), [0])
