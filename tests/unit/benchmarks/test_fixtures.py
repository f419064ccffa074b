import json

import numpy as np
import pytest
import torch
from comparison.fixture_tokenizer import FIRST_WORD_ID
from comparison.fixtures import (
    RANK_8,
    RANK_64,
    Fixture,
    adapter_kind,
)
from comparison.shapes import SMALL, TINY, ModelShape, find_shape
from safetensors import safe_open
from tokenizers import Tokenizer

from loraplex.bench.random_adapters import to_bfloat16, widen_bfloat16
from loraplex.core.errors import ConfigError
from support.naming import naming

MIDGET = ModelShape(
    name="midget",
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    ffn_size=48,
    vocab_size=FIRST_WORD_ID + 700,
)


@pytest.fixture(scope="module")
def fixture(tmp_path_factory):
    fixture = Fixture(MIDGET, tmp_path_factory.mktemp("fixtures"))
    fixture.ensure_model()
    return fixture


def test_the_sizes_are_those_of_the_peers_measured():
    assert TINY.num_parameters == pytest.approx(56e6, rel=0.01)
    assert SMALL.num_parameters == pytest.approx(853e6, rel=0.01)
    assert find_shape("tiny") is TINY
    with pytest.raises(ConfigError, match=naming("tiny", "small", "huge")):
        find_shape("huge")


def test_bfloat16_rounds_as_torch_does():
    values = np.random.default_rng(0).standard_normal(20000, dtype=np.float32) * np.float32(1e3)
    ties = np.array([1 + 2**-8, 1 + 3 * 2**-8, -0.0, 3e38], np.float32)
    for array in (values, ties):
        ours = widen_bfloat16(to_bfloat16(array))
        assert np.array_equal(ours, torch.from_numpy(array).bfloat16().float().numpy())


def test_transformers_reads_the_model(fixture):
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(fixture.model, dtype=torch.float32)
    assert sum(weight.numel() for weight in model.parameters()) == MIDGET.num_parameters
    prompt = torch.tensor([list(fixture.vocabulary[:20])])
    with torch.no_grad():
        logits = model(prompt).logits[0]
    assert logits[:, FIRST_WORD_ID:].std() == pytest.approx(1, rel=0.2)
    assert not logits[:, :FIRST_WORD_ID].any()
    assert (logits.argmax(-1) >= FIRST_WORD_ID).all()


def test_a_text_encodes_its_tokens(fixture):
    tokenizer = Tokenizer.from_file(str(fixture.model / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == MIDGET.vocab_size == len(fixture.tokens)
    token_ids = [*fixture.vocabulary[::37]]
    text = "".join(fixture.tokens[token_id] for token_id in token_ids)
    assert tokenizer.decode(token_ids) == text
    assert len(text) == 4 * len(token_ids)
    assert len({fixture.tokens[token_id] for token_id in fixture.vocabulary}) == 700
    assert tokenizer.encode(fixture.tokens[FIRST_WORD_ID + 3]).ids[-1] == FIRST_WORD_ID + 3


def test_everything_follows_from_shape_and_seed(fixture, tmp_path):
    again = Fixture(MIDGET, tmp_path)
    again.ensure_model()
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (again.model / name).read_bytes() == (fixture.model / name).read_bytes()
    [third] = again.adapters(RANK_8, 1, first=2)
    assert third.name == "r8-0002"
    weights = third.path / "adapter_model.safetensors"
    other = fixture.adapters(RANK_8, 3)[2].path / "adapter_model.safetensors"
    assert weights.read_bytes() == other.read_bytes()


def test_adapters_are_made_once(fixture):
    [adapter] = fixture.adapters(RANK_64, 1)
    before = (adapter.path / "adapter_model.safetensors").stat().st_mtime_ns
    assert fixture.adapters(RANK_64, 1) == (adapter,)
    assert (adapter.path / "adapter_model.safetensors").stat().st_mtime_ns == before
    config = json.loads((adapter.path / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], len(config["target_modules"])) == (64, 128, 7)


@pytest.mark.parametrize("rank", [8, 64])
def test_a_change_is_half_of_what_it_changes(fixture, rank):
    kind = adapter_kind(rank, ("q_proj",))
    folder = Fixture(MIDGET, fixture.model.parent.parent)
    [adapter] = folder.adapters(kind, 1, first=100)
    x = np.random.default_rng(1).standard_normal((32, 500), dtype=np.float32)
    with safe_open(adapter.path / "adapter_model.safetensors", framework="np") as tensors:
        keys = [key for key in tensors.keys() if "layers.0" in key]  # noqa: SIM118
        a, b = (tensors.get_tensor(key).astype(np.float32) for key in sorted(keys))
    delta = b @ (a @ x) * adapter.alpha / adapter.rank
    assert delta.std() == pytest.approx(0.5, rel=0.25)


def test_half_a_folder_is_not_taken_for_a_whole_one(fixture):
    draft = fixture.model.parent / "adapters" / "r8-0500.draft"
    draft.mkdir(parents=True)
    (draft / "adapter_config.json").write_text("{}")
    [adapter] = fixture.adapters(RANK_8, 1, first=500)
    assert (adapter.path / "adapter_model.safetensors").exists()
    assert not draft.exists()


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=naming("file")):
        Fixture(MIDGET, tmp_path / "file").ensure_model()
