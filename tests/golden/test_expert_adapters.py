"""Adapters of experts that PEFT itself made: served as PEFT computes them, in each dialect."""

import copy
import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

from loraplex.adapters.staged import StagedAdapter, StageRequest
from loraplex.adapters.staging_worker import stage
from loraplex.app.builder import base_shapes
from loraplex.execution.adapters.loader import read_host_adapter
from loraplex.models.registry import read_config
from support.families.experts import CASES
from support.reference_completions import completion, recorded_driver, relative_error
from support.step_driver import Prompt

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    # PEFT looks for the patterns of parameters among the modules.
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match"),
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated"),
]

TOLERANCE = 1e-4
"""Relative to the largest logit."""
NUM_TOKENS = 6
RANK = 4
PROMPT = Prompt(tuple(range(5, 24)))
WEIGHTS = "adapter_model.safetensors"
BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
MIXTRAL_MODULES = ["w1", "w2", "w3", "gate", "q_proj"]
HUB_MODULES = ["gate_proj", "up_proj", "down_proj", "gate", "o_proj"]

SHARED_ONLY = "shared expert, its gate and dense layers"
"""Modules that PEFT does not turn into parameters of Qwen2-MoE: it leaves the experts bare."""
MADE: Mapping[str, tuple[str, dict[str, Any]]] = {
    "modules that become parameters": ("mixtral", {"target_modules": MIXTRAL_MODULES}),
    "modules of Qwen3": ("qwen3-moe", {"target_modules": HUB_MODULES}),
    "two parameters": ("mixtral", {"target_parameters": BOTH}),
    "two parameters of OLMoE": ("olmoe", {"target_parameters": BOTH}),
    "gate and up": ("qwen3-moe", {"target_parameters": BOTH[:1]}),
    "down": ("qwen3-moe", {"target_parameters": BOTH[1:]}),
    "a square parameter alone": ("olmoe-square", {"target_parameters": BOTH[:1]}),
    "router": ("mixtral", {"target_parameters": ["gate.weight"], "rank_pattern": {"weight": 2}}),
    "ranks and alphas by pattern": (
        "mixtral",
        {
            "target_modules": ["k_proj"],
            "target_parameters": BOTH,
            "use_rslora": True,
            "rank_pattern": {"experts.down_proj": 2, "layers.0.mlp.experts.gate_up_proj": 3},
            "alpha_pattern": {"gate_up_proj": 5},
        },
    ),
    SHARED_ONLY: (
        "qwen2-moe",
        {"target_modules": [*HUB_MODULES[:3], "shared_expert_gate", "v_proj"]},
    ),
    "all that Qwen2 has": (
        "qwen2-moe",
        {
            "target_modules": [*HUB_MODULES[:3], "shared_expert_gate"],
            "target_parameters": [*BOTH, "gate.weight"],
        },
    ),
    "interleaved and transposed": ("gpt-oss", {"target_parameters": [*BOTH, "router.weight"]}),
    "square and transposed": ("gpt-oss-square", {"target_parameters": BOTH[1:]}),
    "square gate and up": ("gpt-oss-square-gate", {"target_parameters": BOTH[:1]}),
    "Phi": ("phimoe", {"target_parameters": [*BOTH, "router.weight"]}),
    "a fused shared expert": (
        "granite-moe-shared",
        {
            "target_modules": ["input_linear", "output_linear", "v_proj"],
            "target_parameters": [
                "block_sparse_moe.experts.gate_up_proj",
                "experts.down_proj",
                "router.weight",
            ],
        },
    ),
}


@dataclasses.dataclass(frozen=True)
class Base:
    folder: Path
    model: Any
    """That of transformers."""

    def stage(self, adapter: Path) -> StagedAdapter:
        request = StageRequest(
            request_id=1,
            path=str(adapter),
            state_dir=str(self.folder / "state"),
            shapes=base_shapes(read_config(self.folder)),
            reads_again=True,
        )
        return stage(request)

    def completion(self, staged: StagedAdapter) -> tuple[torch.Tensor, list[int]]:
        adapters = {7: read_host_adapter(staged.source)}
        driver, sampler = recorded_driver(self.folder, adapters, is_scrambled=False)
        prompt = dataclasses.replace(PROMPT, adapters=((7, 1.0),))
        (tokens,) = driver.generate([prompt], NUM_TOKENS, prompt_logits=True)
        return sampler.logits[0], tokens


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Base]:
    """A function of a case's name."""
    made: dict[str, Base] = {}

    def get(name: str) -> Base:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            made[name] = Base(folder, CASES[name].save(folder))
        return made[name]

    return get


def train(base: Base, folder: Path, **config: Any) -> Path:
    """Save an adapter whose A and B are random, with PEFT's own config."""
    model = get_peft_model(copy.deepcopy(base.model), LoraConfig(r=RANK, lora_alpha=2, **config))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                scale = 1 / parameter.shape[1] ** 0.5
                parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder)
    return folder


@pytest.mark.some(8)
@pytest.mark.parametrize("name", MADE)
def test_what_peft_made_is_served_as_peft_computes_it(
    name: str, bases: Callable[[str], Base], tmp_path: Path
) -> None:
    case, config = MADE[name]
    base = bases(case)
    folder = train(base, tmp_path / "adapter", **config)
    staged = base.stage(folder)
    if name == SHARED_ONLY:
        (warning,) = staged.warnings
        assert "of routed experts are targeted, but there are no tensors of them" in warning
    else:
        assert not staged.warnings
    logits, tokens = base.completion(staged)
    # PEFT sorts the patterns when it saves them, so the file counts and not the trained model.
    reference = PeftModel.from_pretrained(copy.deepcopy(base.model), folder).eval()
    with torch.no_grad():
        expected, expected_tokens = completion(reference, PROMPT, NUM_TOKENS)
        with reference.disable_adapter():
            bare, _ = completion(reference, PROMPT, 1)
    assert relative_error(logits, expected) < TOLERANCE
    assert tokens == expected_tokens
    assert relative_error(bare, expected) > 100 * TOLERANCE


def test_the_pairs_of_each_expert_are_served_as_peft_loads_them(
    bases: Callable[[str], Base], tmp_path: Path
) -> None:
    """PEFT saved them before transformers 5. The rows are those of what it converts them to."""
    base = bases("mixtral")
    one = save_pairs(tmp_path / "D1", "block_sparse_moe")
    staged = base.stage(one)
    reference = PeftModel.from_pretrained(copy.deepcopy(base.model), one).eval()
    logits, tokens = base.completion(staged)
    with torch.no_grad():
        expected, expected_tokens = completion(reference, PROMPT, NUM_TOKENS)
    assert relative_error(logits, expected) < TOLERANCE
    assert tokens == expected_tokens
    reference.save_pretrained(tmp_path / "D2")
    names = set(load_file(tmp_path / "D2" / WEIGHTS))
    assert any("experts.base_layer.lora_A" in name for name in names)
    others = [tmp_path / "D2", save_pairs(tmp_path / "other", "mlp")]
    assert {base.stage(other).source.digest for other in others} == {staged.source.digest}


def save_pairs(folder: Path, parent: str) -> Path:
    """Write a pair for each expert of Mixtral, as PEFT 0.18 with transformers 4."""
    config = CASES["mixtral"].config()
    sizes = {
        "w1": (config.hidden_size, config.intermediate_size),
        "w3": (config.hidden_size, config.intermediate_size),
        "w2": (config.intermediate_size, config.hidden_size),
    }
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for layer in range(config.num_hidden_layers):
        for expert in range(config.num_local_experts):
            for module, (num_in, num_out) in sizes.items():
                path = f"base_model.model.model.layers.{layer}.{parent}.experts.{expert}.{module}"
                a = torch.randn(RANK, num_in, generator=generator) / num_in**0.5
                b = torch.randn(num_out, RANK, generator=generator) / RANK**0.5
                tensors |= {f"{path}.lora_A.weight": a, f"{path}.lora_B.weight": b}
    folder.mkdir()
    save_file(tensors, folder / WEIGHTS)
    (folder / "adapter_config.json").write_text(
        json.dumps(
            {
                "peft_type": "LORA",
                "peft_version": "0.18.1",
                "r": RANK,
                "lora_alpha": 2,
                "target_modules": list(sizes),
            }
        )
    )
    return folder


def test_an_adapter_that_was_never_trained_is_the_base(
    bases: Callable[[str], Base], tmp_path: Path
) -> None:
    base = bases("mixtral")
    config = LoraConfig(r=RANK, target_parameters=BOTH)
    get_peft_model(copy.deepcopy(base.model), config).save_pretrained(tmp_path)
    staged = base.stage(tmp_path)
    assert staged.changes_nothing
    assert staged.source.targets == ()
    logits, tokens = base.completion(staged)
    with torch.no_grad():
        expected, expected_tokens = completion(base.model, PROMPT, NUM_TOKENS)
    assert relative_error(logits, expected) < TOLERANCE
    assert tokens == expected_tokens
