"""Classification: heads of checkpoints and of adapters, as transformers and PEFT compute them."""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, TaskType, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    OPTConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from loraplex import LLM, AdapterMismatchError, SamplingParams, UnsupportedFeatureError
from loraplex.app.plan import plan_memory
from loraplex.core.config import ModelConfig
from loraplex.demo import BASE_PATH
from loraplex.execution.weights import hub
from support.checkpoints import save_random_model, tiny_sizes
from support.families.every import CASES

VOCAB_SIZE = 199
PAD = 7
SIZES = tiny_sizes(VOCAB_SIZE, head_dim=16)
CONFIGS: Mapping[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZES, pad_token_id=PAD),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=True, pad_token_id=PAD),
    "qwen3": Qwen3Config(**SIZES, tie_word_embeddings=True, pad_token_id=PAD),
}
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 64,
    "kv_cache_bytes": 1 << 20,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 12,
    "lora_device_bytes": 8 << 20,
}
"""Prompts are cut into chunks, which share steps with rows of other tasks."""
PROMPTS = [list(range(11, 11 + length)) for length in (1, 9, 33)]
PADDED = [20, 21, 22, PAD, PAD]
"""It ends with the pad token: the token before is classified."""


def with_tokenizer(folder: Path) -> Path:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BASE_PATH / name, folder)
    return folder


def scores_of(model: Any, prompt: Sequence[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([list(prompt)])).logits[0]


def classifier(base: Path, num_labels: int) -> Any:
    """Return the base with a random head of so many labels, in transformers."""
    torch.default_generator.manual_seed(num_labels)
    model = AutoModelForSequenceClassification.from_pretrained(
        base, num_labels=num_labels, dtype=torch.float32
    ).eval()
    torch.nn.init.normal_(model.score.weight, std=0.5)
    return model


def save_adapter(model: Any, folder: Path, **settings: Any) -> PeftModel:
    config = LoraConfig(r=4, lora_alpha=8, **{"target_modules": ["q_proj", "v_proj"]} | settings)
    tuned: PeftModel = get_peft_model(model, config).eval()
    torch.default_generator.manual_seed(5)
    for name, parameter in tuned.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    tuned.save_pretrained(str(folder))
    return tuned


class Adapters:
    """A base without a head, and adapters with heads of 2, 3 and 77 labels."""

    NUM_LABELS: Mapping[str, int] = MappingProxyType({"two": 2, "three": 3, "many": 77})

    def __init__(self, folder: Path, name: str) -> None:
        self.base = folder / "base"
        save_random_model(self.base, CONFIGS[name])
        with_tokenizer(self.base)
        self.folders = {each: folder / each for each in self.NUM_LABELS}
        self.models = {
            each: save_adapter(
                classifier(self.base, num), self.folders[each], task_type=TaskType.SEQ_CLS
            )
            for each, num in self.NUM_LABELS.items()
        }


@pytest.fixture(scope="module", params=list(CONFIGS))
def adapters(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Adapters:
    return Adapters(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture
def llm(adapters: Adapters, tmp_path: Path) -> Iterator[LLM]:
    with LLM(adapters.base, adapters.folders, state_dir=tmp_path / "state", **SETTINGS) as model:
        yield model


def test_heads_of_adapters_in_one_batch(adapters: Adapters, llm: LLM) -> None:
    jobs = [(name, prompt) for name in adapters.models for prompt in (*PROMPTS, PADDED)]
    names, prompts = [name for name, _ in jobs], [prompt for _, prompt in jobs]
    scores = llm.classify(prompts, adapter=names, use_activation=False)
    found = llm.classify(prompts, adapter=names)
    for (name, prompt), raw, result in zip(jobs, scores, found, strict=True):
        wanted = scores_of(adapters.models[name], prompt)
        torch.testing.assert_close(torch.from_numpy(raw.probs), wanted, rtol=1e-4, atol=1e-4)
        probs = torch.from_numpy(result.probs)
        torch.testing.assert_close(probs, wanted.softmax(-1), rtol=1e-4, atol=1e-5)
        assert result.num_classes == Adapters.NUM_LABELS[name]
        assert result.label == f"LABEL_{int(wanted.argmax())}"
        assert result.labels == tuple(f"LABEL_{index}" for index in range(result.num_classes))
    hits = llm.classify(prompts[::-1], adapter=names[::-1])[::-1]
    assert any(result.timing.num_cached_tokens for result in hits)
    for result, again in zip(found, hits, strict=True):
        assert result.probs.tobytes() == again.probs.tobytes(), "a prefix hit changes no bit"
    alone = llm.classify(prompts[2], adapter=names[2])[0]
    assert alone.probs.tobytes() == found[2].probs.tobytes(), "nor do other rows"


def test_what_has_no_head_is_refused(adapters: Adapters, llm: LLM, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedFeatureError, match="base' has no classification head"):
        llm.classify("text")
    save_adapter(AutoModelForCausalLM.from_pretrained(adapters.base), tmp_path / "bare")
    llm.add_adapter("bare", tmp_path / "bare")
    with pytest.raises(UnsupportedFeatureError, match="'bare' has no classification head"):
        llm.classify("text", adapter="bare")
    with pytest.raises(UnsupportedFeatureError, match="'bare' has no classification head"):
        llm.classify(["text", "text"], adapter=["two", "bare"])
    with pytest.raises(UnsupportedFeatureError, match="replaces rows of score"):
        llm.classify("text", adapter={"two": 0.5, "three": 0.5})
    composed = llm.classify([PROMPTS[1]] * 2, adapter=[{"two": 1.0, "bare": 0.5}, "two"])
    assert composed[0].num_classes == 2
    assert composed[0].probs.tobytes() != composed[1].probs.tobytes()
    save_adapter(classifier(adapters.base, 2), tmp_path / "part", target_modules=["score"])
    with pytest.raises(AdapterMismatchError, match=r"no score\.weight"):
        llm.add_adapter("part", tmp_path / "part")


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"max_lora_rank": 4, "lora_device_bytes": 36_000}, id="evictions"),
        pytest.param({"tensor_parallel_size": 2}, marks=pytest.mark.slow, id="ranks"),
        pytest.param({"pipeline_parallel_size": 2}, marks=pytest.mark.slow, id="stages"),
    ],
)
def test_heads_that_move(
    adapters: Adapters, llm: LLM, tmp_path: Path, changes: dict[str, Any]
) -> None:
    """A head goes and returns with its adapter, and each rank of the last stage has it whole."""
    names = [name for name in adapters.models for _ in PROMPTS]
    prompts = PROMPTS * len(adapters.models)
    expected = llm.classify(prompts, adapter=names)
    settings, state_dir = SETTINGS | changes, tmp_path / "moved"
    with LLM(adapters.base, adapters.folders, state_dir=state_dir, **settings) as moved:
        found = [moved.classify(prompts, adapter=names) for _ in range(2)]
        evictions = moved.stats().adapters.device_evictions
    assert (evictions > 0) == ("lora_device_bytes" in changes)
    for wanted, *both in zip(expected, *found, strict=True):
        for result in both:
            np.testing.assert_allclose(result.probs, wanted.probs, rtol=1e-4, atol=1e-6)
            if "tensor_parallel_size" not in changes:
                assert result.probs.tobytes() == wanted.probs.tobytes()


HEADS: Mapping[str, PretrainedConfig] = {
    **CONFIGS,
    "gpt2": GPT2Config(
        vocab_size=VOCAB_SIZE, n_embd=64, n_layer=2, n_head=4, n_positions=128, pad_token_id=PAD
    ),
    "gemma3": Gemma3TextConfig(**SIZES, sliding_window=16, pad_token_id=PAD),
    "opt": OPTConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        word_embed_proj_dim=32,
        ffn_dim=112,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
        pad_token_id=PAD,
    ),
}


LINEAR = {"gpt2": ["c_attn", "c_fc"], "opt": ["q_proj", "fc2"]}
"""Modules of adapters of families with other names."""


@pytest.mark.parametrize("name", HEADS)
def test_checkpoints_with_a_head(tmp_path: Path, name: str) -> None:
    plain, base = tmp_path / "plain", tmp_path / "base"
    save_random_model(plain, HEADS[name])
    model = classifier(plain, 3)
    model.config.id2label = {0: "bad", 1: "fine", 2: "good"}
    model.config.label2id = {"bad": 0, "fine": 1, "good": 2}
    model.save_pretrained(base)
    with_tokenizer(base)
    expected = [scores_of(model, prompt) for prompt in (*PROMPTS, PADDED)]
    # An adapter without a head, LoRA of the base's, a copy of it; then another number of labels.
    linear, is_conv = LINEAR.get(name, ["q_proj", "down_proj"]), name == "gpt2"
    settings: dict[str, dict[str, Any]] = {
        "bare": {},
        # PEFT has one fan_in_fan_out for all modules: true for a Conv1D, false for score.
        "part": {"target_modules": ["score", *linear[is_conv * 2 :]], "fan_in_fan_out": False},
        "own": {"task_type": TaskType.SEQ_CLS},
    }
    models = {}
    for each, changes in settings.items():
        fresh = AutoModelForSequenceClassification.from_pretrained(base, dtype=torch.float32)
        changes = {"target_modules": linear, "fan_in_fan_out": is_conv} | changes
        models[each] = save_adapter(fresh.eval(), tmp_path / each, **changes)
        if each == "own":
            with torch.no_grad():
                fresh.score.modules_to_save["default"].weight.mul_(-1.5)
            models[each].save_pretrained(str(tmp_path / each))
    changes = {"target_modules": linear, "fan_in_fan_out": is_conv, "task_type": TaskType.SEQ_CLS}
    models["two"] = save_adapter(classifier(plain, 2), tmp_path / "two", **changes)
    assert any("score.lora_A" in key for key, _ in models["part"].named_parameters())
    folders = {each: tmp_path / each for each in models}
    jobs = [(None, prompt) for prompt in (*PROMPTS, PADDED)]
    jobs += [(each, prompt) for each in models for prompt in (*PROMPTS, PADDED)]
    expected += [
        scores_of(models[each], prompt) for each in models for prompt in (*PROMPTS, PADDED)
    ]
    with LLM(base, folders, state_dir=tmp_path / "state", **SETTINGS) as llm:
        names, prompts = [each for each, _ in jobs], [prompt for _, prompt in jobs]
        found = llm.classify(prompts, adapter=names, use_activation=False)
        with pytest.raises(UnsupportedFeatureError, match="no output layer"):
            llm.generate([[1, 2]], SamplingParams(max_tokens=2))
        (embedded,) = llm.embed([PROMPTS[1]])
    for wanted, result in zip(expected, found, strict=True):
        torch.testing.assert_close(
            torch.from_numpy(result.probs), wanted, rtol=1e-4, atol=1e-4, msg=name
        )
        labels = ("bad", "fine", "good") if len(wanted) == 3 else ("LABEL_0", "LABEL_1")
        assert result.label == labels[int(wanted.argmax())]
    assert len(embedded.vector)


def test_a_plan_reads_the_head_of_a_model_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LoRA of the head becomes a whole copy, for which the plan needs the base's own."""
    save_random_model(tmp_path / "plain", CONFIGS["llama"])
    base = tmp_path / "hub" / "models--o--base" / "snapshots" / "abc"
    classifier(tmp_path / "plain", 3).save_pretrained(base)
    with_tokenizer(base)
    fresh = AutoModelForSequenceClassification.from_pretrained(base, dtype=torch.float32)
    save_adapter(fresh.eval(), tmp_path / "part", target_modules=["score", "q_proj"])
    monkeypatch.setattr(hub, "_download", lambda *_: base)
    config = ModelConfig(path="o/base")
    [planned] = plan_memory(config, [str(tmp_path / "part")]).adapters.adapters
    assert planned.problem == ""
    assert planned.device_pages > 0


@pytest.mark.parametrize(
    ("num_labels", "fields", "function"),
    [
        (1, {}, torch.sigmoid),
        (3, {}, lambda x: x.softmax(-1)),
        (3, {"problem_type": "multi_label_classification"}, torch.sigmoid),
        (1, {"problem_type": "regression"}, lambda x: x),
        (
            2,
            {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}},
            lambda x: x,
        ),
        (
            3,
            {"sbert_ce_default_activation_function": "torch.nn.modules.activation.Sigmoid"},
            torch.sigmoid,
        ),
    ],
)
def test_activations_of_config(
    tmp_path: Path, num_labels: int, fields: dict[str, Any], function: Any
) -> None:
    plain, base = tmp_path / "plain", tmp_path / "base"
    save_random_model(plain, CONFIGS["llama"])
    model = classifier(plain, num_labels)
    model.save_pretrained(base)
    with_tokenizer(base)
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | fields))
    with LLM(base, state_dir=tmp_path / "state", **SETTINGS) as llm:
        (result,) = llm.classify([PROMPTS[2]])
    wanted = function(scores_of(model, PROMPTS[2]))
    torch.testing.assert_close(torch.from_numpy(result.probs), wanted, rtol=1e-4, atol=1e-5)


def test_a_text_of_padding_and_one_without_a_pad_token(tmp_path: Path) -> None:
    plain, base = tmp_path / "plain", tmp_path / "base"
    for pad_token_id in (PAD, None):
        config = LlamaConfig(**SIZES, pad_token_id=pad_token_id)
        save_random_model(plain, config)
        model = classifier(plain, 2)
        model.config.pad_token_id = pad_token_id
        model.save_pretrained(base)
        with_tokenizer(base)
        prompts = [[PAD, PAD, PAD], [20, PAD], [PAD, 20, PAD, 21, PAD]]
        with LLM(base, state_dir=tmp_path / "state", **SETTINGS) as llm:
            found = llm.classify(prompts, use_activation=False)
        for prompt, result in zip(prompts, found, strict=True):
            wanted = scores_of(model, prompt)
            torch.testing.assert_close(torch.from_numpy(result.probs), wanted, rtol=1e-4, atol=1e-4)
            kept = 1 if prompt[0] == prompt[1] else len(prompt) - 1
            expected = len(prompt) if pad_token_id is None else kept
            assert len(result.prompt_token_ids) == expected


FAMILIES = (
    *("gemma2", "phi", "phi3", "ministral", "ministral3", "olmo2", "olmo3", "glm4", "gpt-neox"),
    *("starcoder2", "smollm3", "falcon", "bloom", "gptj", "opt-350m", "mixtral", "qwen2-moe"),
    *("qwen3-moe", "gpt-oss", "qwen3.5", "qwen3-next"),
    *("deepseek-v2", "deepseek-v3", "mistral4", "gemma3-wrapper", "qwen3.5-wrapper"),
)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_heads_of_other_families(tmp_path: Path, name: str) -> None:
    torch.default_generator.manual_seed(0)
    config = CASES[name].config()
    config.num_labels = 3
    model = AutoModelForSequenceClassification.from_config(config).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            mean = 1.0 if "norm" in key or "ln_" in key else 0.0
            parameter.copy_(mean + 0.1 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path / "base")
    with_tokenizer(tmp_path / "base")
    prompts = [[3, 9, 4, 1, 8, 22], [5]]
    settings = SETTINGS | {"max_model_len": 32, "kv_cache_bytes": 4 << 20}
    with LLM(tmp_path / "base", state_dir=tmp_path / "state", **settings) as llm:
        found = llm.classify(prompts, use_activation=False)
    for prompt, result in zip(prompts, found, strict=True):
        wanted = scores_of(model, prompt)
        torch.testing.assert_close(torch.from_numpy(result.probs), wanted, rtol=1e-4, atol=1e-4)
