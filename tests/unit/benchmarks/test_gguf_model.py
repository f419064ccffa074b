"""The written files are read by llama.cpp's package, and served weights have the size meant."""

import json

import gguf
import numpy as np
import pytest
from comparison.fixture_tokenizer import FIRST_WORD_ID
from comparison.fixtures import RANK_8, Fixture
from comparison.gguf_blocks import random_rows
from comparison.gguf_model import gguf_bits, tensor_types, write_gguf_model
from comparison.shapes import LLAMA_8B, QWEN_1_5B, SHAPES, HybridShape, ModelShape
from tokenizers import Tokenizer

from loraplex import LLM, SamplingParams
from loraplex.core.errors import ConfigError
from loraplex.core.gguf import BlockType
from loraplex.execution.weights.gguf_folder import gguf_folder
from support.naming import naming

MINI = ModelShape(
    name="mini",
    hidden_size=256,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    ffn_size=512,
    vocab_size=FIRST_WORD_ID + 300,
    is_large=True,
    has_folder_weights=False,
)
MINI_QWEN = ModelShape(
    name="qwen2-mini",
    family="qwen2",
    hidden_size=256,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    ffn_size=512,
    vocab_size=FIRST_WORD_ID + 300,
    is_tied=True,
    has_qkv_bias=True,
    is_large=True,
)
MINI_HYBRID = HybridShape(
    name="qwen3.5-mini",
    family="qwen3_5_text",
    hidden_size=256,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    attention_head_size=64,
    num_key_heads=2,
    num_value_heads=4,
    delta_head_size=32,
    ffn_size=512,
    vocab_size=FIRST_WORD_ID + 300,
)


def read(path):
    return {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}


def values(tensor):
    return gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float64)


@pytest.mark.parametrize("gguf_type", ["Q4_K_M", "Q5_K_M", "Q6_K", "Q8_0", "F16", "BF16"])
def test_weights_have_the_deviation_of_their_layer_and_the_mean_0(tmp_path, gguf_type):
    write_gguf_model(tmp_path / "model.gguf", MINI, gguf_type)
    tensors = read(tmp_path / "model.gguf")
    assert len(tensors) == len(MINI.tensors())
    for name in ("blk.1.attn_q.weight", "blk.0.ffn_down.weight"):
        found = values(tensors[name])
        assert found.std() * found.shape[1] ** 0.5 == pytest.approx(1, rel=0.03)
        assert abs(found.mean()) < 0.03 * found.std()
    assert values(tensors["token_embd.weight"]).std() == pytest.approx(1, rel=0.03)
    output = values(tensors["output.weight"])
    assert not output[:FIRST_WORD_ID].any()
    assert output[FIRST_WORD_ID:].any(axis=1).all()


def test_a_tied_embedding_is_the_output_layer(tmp_path):
    write_gguf_model(tmp_path / "model.gguf", MINI_QWEN, "Q8_0")
    tensors = read(tmp_path / "model.gguf")
    assert "output.weight" not in tensors
    assert tensors["blk.0.attn_k.bias"].data.std() == pytest.approx(0.1, rel=0.3)
    embedding = values(tensors["token_embd.weight"])
    assert not embedding[:FIRST_WORD_ID].any()
    assert embedding[FIRST_WORD_ID:].std() == pytest.approx(256**-0.5, rel=0.03)


def test_the_mix_is_that_of_llama_quantize():
    types = tensor_types(LLAMA_8B, "Q4_K_M")
    of_values = [types[f"model.layers.{n}.self_attn.v_proj.weight"] for n in range(32)]
    more = [n for n, kind in enumerate(of_values) if kind is BlockType.Q6_K]
    assert more == [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31]
    assert types["lm_head.weight"] is BlockType.Q6_K
    assert types["model.layers.0.self_attn.q_proj.weight"] is BlockType.Q4_K
    assert types["model.norm.weight"] is BlockType.F32
    assert tensor_types(QWEN_1_5B, "Q4_K_M")["model.embed_tokens.weight"] is BlockType.Q6_K
    assert [gguf_bits(kind) for kind in ("Q4_K_M", "Q8_0", "BF16", "F16")] == [4, 8, 16, 16]
    with pytest.raises(ConfigError, match=naming("Q4_K_M", "Q2_K")):
        tensor_types(LLAMA_8B, "Q2_K")


def test_rows_are_whole_blocks():
    draws = np.random.default_rng(0)
    with pytest.raises(ConfigError, match=naming(128, 256, "Q4_K")):
        random_rows(BlockType.Q4_K, (4, 128), 1.0, draws)
    with pytest.raises(ConfigError, match=naming("Q2_K")):
        random_rows(BlockType.Q2_K, (4, 256), 1.0, draws)


def test_the_sizes_are_those_of_the_models():
    assert LLAMA_8B.num_parameters == pytest.approx(8.03e9, rel=0.001)
    assert QWEN_1_5B.num_parameters == pytest.approx(1.544e9, rel=0.001)
    assert [shape.folder for shape in (LLAMA_8B, QWEN_1_5B)] == ["llama-3.1-8b", "qwen2.5-1.5b"]


def test_a_text_encodes_its_tokens_with_the_tokenizer_of_the_file(tmp_path):
    fixture = Fixture(MINI, tmp_path)
    folder = gguf_folder(fixture.gguf_file("Q8_0"), tmp_path / "folders")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    token_ids = [*fixture.vocabulary[::37]]
    assert tokenizer.decode(token_ids) == "".join(fixture.tokens[each] for each in token_ids)
    assert tokenizer.encode(fixture.tokens[FIRST_WORD_ID + 3]).ids[-1] == FIRST_WORD_ID + 3


def test_a_file_is_written_once_and_whole(tmp_path):
    fixture = Fixture(MINI, tmp_path)
    path = fixture.gguf_file("Q6_K")
    before = path.stat().st_mtime_ns
    assert fixture.gguf_file("Q6_K") == path
    assert path.stat().st_mtime_ns == before
    assert [each.name for each in path.parent.iterdir()] == ["Q6_K.gguf"]
    with pytest.raises(ConfigError, match=naming("Q2_K")):
        fixture.gguf_file("Q2_K")


def test_a_model_without_folder_weights_has_its_configuration_and_adapters(tmp_path):
    fixture = Fixture(MINI, tmp_path)
    fixture.ensure_model()
    names = {path.name for path in fixture.model.iterdir()}
    assert {"config.json", "tokenizer.json"} <= names
    assert "model.safetensors" not in names


def test_transformers_reads_the_folder_of_a_tied_model(tmp_path):
    transformers = pytest.importorskip("transformers")
    import torch

    fixture = Fixture(MINI_QWEN, tmp_path)
    fixture.ensure_model()
    model = transformers.AutoModelForCausalLM.from_pretrained(fixture.model, dtype=torch.float32)
    assert model.config.model_type == "qwen2"
    assert sum(weight.numel() for weight in model.parameters()) == MINI_QWEN.num_parameters
    prompt = list(fixture.vocabulary[:20])
    with torch.no_grad():
        logits = model(torch.tensor([prompt])).logits[0]
    assert not logits[:, :FIRST_WORD_ID].any()
    assert (logits.argmax(-1) >= FIRST_WORD_ID).all()
    # The layers decide what follows a token, not its own embedding.
    assert (logits.argmax(-1) != torch.tensor(prompt)).float().mean() > 0.5


def test_a_hybrid_is_served_from_its_folder_and_from_its_file(tmp_path):
    fixture = Fixture(MINI_HYBRID, tmp_path)
    fixture.ensure_model()
    [adapter] = fixture.adapters(RANK_8, 1)
    config = json.loads((adapter.path / "adapter_config.json").read_text())
    assert config["target_modules"] == ["in_proj_qkv", "k_proj", "q_proj", "v_proj"]
    sampling = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    prompt = [*fixture.vocabulary[:9]]
    for model in (fixture.model, fixture.gguf_file("Q8_0")):
        settings = {"max_model_len": 64, "kv_cache_bytes": 1 << 26}
        state = str(tmp_path / "state")
        with LLM(model, {"one": adapter.path}, state_dir=state, **settings) as llm:
            base, own = llm.generate([prompt] * 2, sampling, adapter=[None, "one"])
            assert base.token_ids != own.token_ids


def test_the_hybrids_have_the_size_of_the_llamas():
    for name in ("tiny", "small"):
        llama, hybrid = SHAPES[name].num_parameters, SHAPES[f"qwen3.5-{name}"].num_parameters
        assert hybrid == pytest.approx(llama, rel=0.005)
