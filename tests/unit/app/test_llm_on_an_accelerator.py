"""The whole engine on the GPU's backend, interpreted: its outputs are those of the CPU's."""

import functools
import json
import os

import pytest
import torch
from safetensors.torch import save_file

from loraplex import LLM, SamplingParams
from loraplex.app import rank
from loraplex.execution.loading import load_parts
from loraplex.kernels.accelerator import HostAccelerator
from support.encoder_decoders import CASES, random_inputs, save_adapters, save_case
from support.tiny_text_model import write_tiny_text_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") != "1", reason="the kernels are not interpreted"
    ),
]

ADAPTERS = ["one", None, "two"]
GREEDY = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
SETTINGS = {
    "dtype": "float32",  # the interpreter's bfloat16 is wrong
    "kv_cache_bytes": "1MiB",
    "max_model_len": 32,
    "max_num_seqs": 3,
    "max_num_batched_tokens": 8,
    "max_lora_rank": 4,
    "optimal_lora_rank": 4,
    "lora_device_bytes": "1MiB",
    "num_threads": 1,
}


def write_adapter(folder, seed):
    """PEFT's form, of two layers of the tiny model."""
    folder.mkdir()
    config = {
        "peft_type": "LORA",
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "down_proj"],
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for module, inputs in (("layers.0.self_attn.q_proj", 16), ("layers.1.mlp.down_proj", 24)):
        name = f"base_model.model.model.{module}"
        tensors[f"{name}.lora_A.weight"] = torch.randn(4, inputs, generator=generator)
        tensors[f"{name}.lora_B.weight"] = torch.randn(16, 4, generator=generator)
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def outputs(llm):
    found = llm.generate([[5, 6, 7]] * len(ADAPTERS), GREEDY, adapter=ADAPTERS)
    return [output.token_ids for output in found]


def run_on_an_accelerator(monkeypatch):
    load = functools.partial(load_parts, accelerator=HostAccelerator())
    monkeypatch.setattr(rank, "load_parts", load)


def test_it_outputs_as_a_cpu_does(monkeypatch, tmp_path):
    (tmp_path / "model").mkdir()
    model = write_tiny_text_model(tmp_path / "model", max_model_len=64)
    adapters = {
        "one": write_adapter(tmp_path / "one", 1),
        "two": write_adapter(tmp_path / "two", 2),
    }
    with LLM(model, adapters, state_dir=tmp_path / "cpu", **SETTINGS) as llm:
        expected = outputs(llm)
    run_on_an_accelerator(monkeypatch)
    settings = SETTINGS | {"overlap": True, "cuda_graph_batch_sizes": (3,)}
    with LLM(model, adapters, state_dir=tmp_path / "gpu", **settings) as llm:
        assert outputs(llm) == expected
    assert len(set(map(tuple, expected))) == len(ADAPTERS)


@pytest.mark.parametrize("name", ["flan-t5", "bart"])
def test_encoder_decoders(monkeypatch, tmp_path, name):
    """Adapters of the encoder and of cross attention, and none; recorded steps, and chunks."""
    save_case(tmp_path, CASES[name])
    save_adapters(tmp_path, CASES[name])
    chosen = ["encoder", None, "cross"]
    adapters = {each: tmp_path / each for each in chosen if each is not None}
    inputs = random_inputs((7, 3, 5))

    def logits(llm):
        sampling = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, return_logits=True)
        found = llm.generate(inputs, sampling, adapter=chosen)
        return [torch.tensor(output.completions[0].logits) for output in found]

    with LLM(tmp_path, adapters, state_dir=tmp_path / "cpu", **SETTINGS) as llm:
        expected = logits(llm)
    run_on_an_accelerator(monkeypatch)
    settings = SETTINGS | {"cuda_graph_batch_sizes": (3,)}
    with LLM(tmp_path, adapters, state_dir=tmp_path / "gpu", **settings) as llm:
        for found, wanted in zip(logits(llm), expected, strict=True):
            assert (found - wanted).abs().max() < 1e-4 * wanted.abs().max()
