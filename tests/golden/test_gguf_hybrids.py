"""GGUF files of hybrid models: what their converters change is undone."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig

from loraplex import LLM, SamplingParams
from loraplex.app.llm_outputs import RequestOutput
from loraplex.demo import BASE_PATH
from loraplex.execution.weights.checkpoint import Checkpoint
from loraplex.execution.weights.gguf_folder import gguf_folder
from loraplex.execution.weights.stored_head import read_model
from loraplex.models.parameters import checkpoint_shapes
from support.checkpoints import add_random_adapters, save_random_model
from support.families import convolutions, hybrids, state_spaces
from support.gguf_hybrids import (
    gguf_of_granite,
    gguf_of_hybrid_lora,
    gguf_of_lfm2,
    gguf_of_nemotron,
    gguf_of_qwen3_5,
)

pytestmark = pytest.mark.usefixtures("one_thread")

VOCAB_SIZE = 1024
PROMPTS = [[(37 * i + 11 * k) % 1000 + 3 for k in range(5 + 33 * i)] for i in range(3)]
SAMPLING = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True, prompt_logprobs=0)
THREE_VALUES = {
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 7,
    "linear_value_head_dim": 17,
    "vocab_size": VOCAB_SIZE,
}
WIDE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 256,
    "intermediate_size": 256,
    "head_dim": 64,
    "num_attention_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 128,
}
BASES = {
    "dense": (lambda: hybrids.qwen3_5(**THREE_VALUES), {}),
    "experts": (lambda: hybrids.qwen3_5_moe(**THREE_VALUES, tie_word_embeddings=True), {}),
    "Q4_K_M": (
        lambda: hybrids.qwen3_5(**WIDE),
        {"in_proj_b": "F32", "in_proj_a": "F32", "down_proj": "Q6_K", "proj": "Q4_K"},
    ),
    "next": (lambda: hybrids.qwen3_next(**THREE_VALUES, mlp_only_layers=[]), {}),
    "next Q4_K_M": (
        lambda: hybrids.qwen3_next(**WIDE, mlp_only_layers=[]),
        {"in_proj_ba": "F32", "in_proj_qkvz": "Q4_K", "o_proj": "Q6_K"},
    ),
    "granite": (lambda: state_spaces.granite(vocab_size=VOCAB_SIZE), {}),
    "granite experts": (lambda: state_spaces.granite_moe(vocab_size=VOCAB_SIZE), {}),
    "granite Q8_0": (
        lambda: state_spaces.granite(
            vocab_size=VOCAB_SIZE, hidden_size=64, shared_intermediate_size=64
        ),
        {"ffn": "Q8_0", "attn": "Q8_0", "ssm_in": "Q8_0", "ssm_out": "Q8_0"},
    ),
    "nemotron": (lambda: state_spaces.nemotron(vocab_size=VOCAB_SIZE), {}),
    "nemotron experts": (
        lambda: state_spaces.nemotron_moe(
            vocab_size=VOCAB_SIZE, n_group=1, moe_latent_size=20, tie_word_embeddings=True
        ),
        {},
    ),
}


TARGETS = {
    "granite experts": ("in_proj", "out_proj", *hybrids.ATTENTION_LINEARS),
    "granite": state_spaces.GRANITE["linears"],
    # PEFT refuses out_proj of these.
    "nemotron": ("in_proj", *hybrids.ATTENTION_LINEARS),
    "next": (*hybrids.NEXT_LINEARS, *hybrids.ATTENTION_LINEARS),
    "": (*hybrids.DELTA_LINEARS, *hybrids.ATTENTION_LINEARS),
}
"""Modules of an adapter, by how the name of a base begins."""


def file_of(name: str, original: Path) -> bytes:
    """Return the file of one of BASES."""
    _, kinds = BASES[name]
    if name.startswith("granite"):
        return gguf_of_granite(original, kinds)
    if name.startswith("nemotron"):
        return gguf_of_nemotron(original)
    return gguf_of_qwen3_5(original, kinds, drafts=True)


def saved(folder: Path, config: Any) -> Any:
    model = save_random_model(folder, config)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BASE_PATH / file, folder)
    return model


def log_probabilities(output: RequestOutput) -> torch.Tensor:
    found = output.prompt_logprobs
    assert found is not None
    return torch.tensor([entry.logprob for entry in found[1:] if entry is not None])


def wanted(model: Any, prompt: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits = model(torch.tensor([prompt])).logits[0]
    return logits.log_softmax(-1)[:-1].gather(1, torch.tensor(prompt[1:])[:, None]).flatten()


@pytest.mark.parametrize("name", BASES)
def test_a_base_is_the_one_it_was_made_of(name: str, tmp_path: Path) -> None:
    config, kinds = BASES[name]
    original = tmp_path / "original"
    model = saved(original, config())
    path = tmp_path / f"{name}.gguf"
    path.write_bytes(file_of(name, original))
    folder = gguf_folder(path, tmp_path / "folders")
    spec = read_model(folder)
    of_original = read_model(original)
    assert spec.layers == of_original.layers
    with Checkpoint(folder, spec) as found, Checkpoint(original, of_original) as before:
        for tensor in checkpoint_shapes(spec):
            # Other types than Q8_0 are random numbers, which show in the logits below.
            is_random = any(kind.startswith("Q4") for kind in kinds.values()) and "proj" in tensor
            one, other = found.read(tensor).float(), before.read(tensor).float()
            if not is_random:
                assert (one - other).norm() <= (0.01 if kinds else 1e-6) * other.norm(), tensor
        state = model.state_dict()
        for key in state.keys() & checkpoint_shapes(spec).keys():
            state[key].copy_(found.read(key))
    targets = list(next(own for start, own in TARGETS.items() if name.startswith(start)))
    peft_model = add_random_adapters(
        model, {"peft": LoraConfig(r=4, lora_alpha=8, target_modules=targets)}
    )
    peft_model.save_pretrained(tmp_path / "adapters")
    adapters = {"peft": str(tmp_path / "adapters" / "peft")}
    settings = {"state_dir": str(tmp_path / "state"), "dtype": "float32"}
    names = (None, "peft")
    pairs = [(prompt, adapter) for prompt in PROMPTS for adapter in names]
    with LLM(str(path), adapters, **settings) as llm:
        outputs = llm.generate(
            [prompt for prompt, _ in pairs], SAMPLING, adapter=[adapter for _, adapter in pairs]
        )
    for (prompt, adapter), output in zip(pairs, outputs, strict=True):
        if adapter is None:
            with peft_model.disable_adapter():
                expected = wanted(peft_model, prompt)
        else:
            expected = wanted(peft_model, prompt)
        error = float((log_probabilities(output) - expected).abs().max())
        # Products of stored weights are rounded, which the recurrence enlarges; another order of
        # heads gives errors above 1.
        assert error < (0.2 if kinds else 1e-3)


ADAPTED: dict[str, tuple[Any, Any, tuple[str, ...], bool]] = {
    "qwen3.5": (
        lambda: hybrids.qwen3_5(**THREE_VALUES),
        gguf_of_qwen3_5,
        (*hybrids.DELTA_LINEARS, *hybrids.ATTENTION_LINEARS, *hybrids.MLP_LINEARS),
        True,
    ),
    "next": (
        lambda: hybrids.qwen3_next(**THREE_VALUES, mlp_only_layers=[]),
        gguf_of_qwen3_5,
        # llama.cpp's converter fails with in_proj_qkvz.
        ("in_proj_ba", "out_proj", *hybrids.ATTENTION_LINEARS),
        False,
    ),
    "granite": (
        lambda: state_spaces.granite(vocab_size=VOCAB_SIZE, position_embedding_type="rope"),
        gguf_of_granite,
        state_spaces.GRANITE["linears"],
        True,
    ),
    "nemotron": (
        lambda: state_spaces.nemotron(vocab_size=VOCAB_SIZE),
        gguf_of_nemotron,
        state_spaces.NEMOTRON["linears"],
        True,
    ),
    "lfm2 experts": (
        lambda: convolutions.lfm2_moe(vocab_size=VOCAB_SIZE),
        gguf_of_lfm2,
        ("in_proj", "out_proj", "q_proj", "k_proj", "v_proj", "w1", "w2", "w3"),
        False,
    ),
}
"""Configuration, file of the base, modules of the adapter, and whether the order of rows differs.
"""


@pytest.mark.parametrize("base_is_gguf", [False, True])
@pytest.mark.parametrize("name", ADAPTED)
def test_an_adapter_is_the_one_it_was_made_of(
    name: str, base_is_gguf: bool, tmp_path: Path
) -> None:
    config, make_file, targets, has_order = ADAPTED[name]
    original = tmp_path / "original"
    model = saved(original, config())
    peft_model = add_random_adapters(
        model, {"peft": LoraConfig(r=4, lora_alpha=8, target_modules=list(targets))}
    )
    peft_model.save_pretrained(tmp_path / "adapters")
    adapters = {"peft": str(tmp_path / "adapters" / "peft")}
    for form in ("gguf", "wrong"):
        path = tmp_path / f"{form}.gguf"
        path.write_bytes(
            gguf_of_hybrid_lora(Path(adapters["peft"]), original, reorders=form == "gguf")
        )
        adapters[form] = str(path)
    base = original
    if base_is_gguf:
        base = tmp_path / "base-F32.gguf"
        base.write_bytes(make_file(original))
    settings = {"state_dir": str(tmp_path / "state"), "dtype": "float32"}
    expected = wanted(peft_model, PROMPTS[1])
    with LLM(str(base), adapters, **settings) as llm:
        outputs = llm.generate([PROMPTS[1]] * 3, SAMPLING, adapter=list(adapters))
    errors = {
        form: float((log_probabilities(output) - expected).abs().max())
        for form, output in zip(adapters, outputs, strict=True)
    }
    assert max(errors["peft"], errors["gguf"]) < 1e-3
    assert (errors["wrong"] > 10 * errors["gguf"]) == has_order


def test_older_files_of_qwen3_next_have_one_tensor_of_inputs(tmp_path: Path) -> None:
    original = tmp_path / "original"
    saved(original, hybrids.qwen3_next(**THREE_VALUES, mlp_only_layers=[]))
    found = {}
    for splits in (False, True):
        path = tmp_path / f"{splits}.gguf"
        path.write_bytes(gguf_of_qwen3_5(original, splits=splits))
        folder = gguf_folder(path, tmp_path / "folders")
        with Checkpoint(folder, read_model(folder)) as weights:
            found[splits] = weights.read("model.layers.1.linear_attn.in_proj_qkvz.weight")
    assert torch.equal(found[False], found[True])


LFM2: dict[str, Any] = {
    "dense": lambda: convolutions.lfm2(vocab_size=VOCAB_SIZE, intermediate_size=64),
    "experts": lambda: convolutions.lfm2_moe(vocab_size=VOCAB_SIZE, moe_intermediate_size=64),
}


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
@pytest.mark.parametrize("name", LFM2)
def test_an_lfm2_is_the_one_it_was_made_of(name: str, kind: str, tmp_path: Path) -> None:
    original = tmp_path / "original"
    saved(original, LFM2[name]())
    path = tmp_path / "lfm2.gguf"
    path.write_bytes(gguf_of_lfm2(original, kind))
    folder = gguf_folder(path, tmp_path / "folders")
    spec, of_original = read_model(folder), read_model(original)
    assert spec.layers == of_original.layers
    with Checkpoint(folder, spec) as found, Checkpoint(original, of_original) as before:
        for tensor in checkpoint_shapes(spec):
            one, other = found.read(tensor).float(), before.read(tensor).float()
            assert (one - other).norm() <= (0.01 if kind == "Q8_0" else 0) * other.norm(), tensor
