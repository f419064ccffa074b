"""Copies of the base's own weights in an adapter: left out if they are the base's very values."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from loraplex.adapters import base_copies
from loraplex.adapters.canonical import CanonicalRow, RowKind, read_canonical
from loraplex.adapters.examination import examine
from loraplex.adapters.shapes import BaseShapes
from loraplex.adapters.staged import StageRequest
from loraplex.adapters.tensor_file import RawTensor
from loraplex.core.byte_sizes import readable_bytes
from loraplex.core.errors import AdapterMismatchError, UnsupportedFeatureError
from support.naming import naming

VOCAB, HIDDEN = 50, 8
EMBEDDING = "model.embed_tokens"
SHAPES = BaseShapes(2, {"q_proj": (8, 12)}, vocab_size=VOCAB, hidden_size=HIDDEN)
TIED = BaseShapes(2, {"q_proj": (8, 12)}, VOCAB, HIDDEN, ties_embeddings=True)


def values(*shape: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype("f4")


@pytest.fixture
def base(tmp_path):
    """A function (**tensors by module) -> the folder of a base that holds them."""

    def make(**tensors):
        folder = tmp_path / "base"
        folder.mkdir(exist_ok=True)
        names = {"embed_tokens": f"{EMBEDDING}.weight", "lm_head": "lm_head.weight"}
        save_file(
            {names[module]: tensor for module, tensor in tensors.items()},
            folder / "model.safetensors",
        )
        return folder

    return make


@pytest.fixture
def adapter(peft_folder):
    """Adapter with LoRA of lm_head and a copy of lm_head."""

    def make(copy, module="lm_head"):
        folder = peft_folder()
        name = f"base_model.model.{EMBEDDING if module == 'embed_tokens' else module}"
        shapes = {"lm_head": ((2, HIDDEN), (VOCAB, 2)), "embed_tokens": ((2, VOCAB), (HIDDEN, 2))}
        slots = ("A.weight", "B.weight") if module == "lm_head" else ("A", "B")
        kind = "lora_" if module == "lm_head" else "lora_embedding_"
        folder.tensors = {
            f"{name}.{kind}{slot}": values(*shape)
            for slot, shape in zip(slots, shapes[module], strict=True)
        } | {f"{name}.base_layer.weight": copy}
        folder.config["target_modules"] = [module]
        return folder.write()

    return make


@pytest.fixture
def kinds_of(staged):
    """Return a function (folder, base, shapes) -> the kinds of its rows, and its warnings."""

    def run(folder, base_folder, shapes=SHAPES):
        got = staged(folder, shapes=shapes, base_path=str(base_folder))
        rows = read_canonical(Path(got.source.path)).rows
        return [row.kind for row in rows], got.warnings

    return run


@pytest.mark.parametrize("module", ["lm_head", "embed_tokens"])
def test_the_base_s_own_values_are_left_out_and_reported(kinds_of, adapter, base, module):
    weight = values(VOCAB, HIDDEN)
    other = {"embed_tokens": values(VOCAB, HIDDEN, seed=2), "lm_head": values(VOCAB, 8, seed=3)}
    folder = base(**(other | {module: weight}))
    found, (warning,) = kinds_of(adapter(weight, module), folder)
    assert found == [RowKind.LORA]
    assert module in warning
    assert readable_bytes(weight.nbytes) in warning


def test_one_other_value_keeps_it(kinds_of, adapter, base, monkeypatch):
    monkeypatch.setattr(base_copies, "_PIECE_BYTES", 3 * HIDDEN * 4)
    weight = values(VOCAB, HIDDEN)
    other = weight.copy()
    other[-1, -1] += 1e-6
    found, warnings = kinds_of(adapter(other), base(lm_head=weight))
    assert found == [RowKind.FULL, RowKind.LORA]
    assert warnings == ()


def test_values_are_compared_not_types(kinds_of, adapter, base):
    half = values(VOCAB, HIDDEN).astype("f2")
    assert kinds_of(adapter(half.astype("f4")), base(lm_head=half))[0] == [RowKind.LORA]
    rounded = adapter(half)
    found, _ = kinds_of(rounded, base(lm_head=values(VOCAB, HIDDEN)))
    assert found == [RowKind.FULL, RowKind.LORA]


def test_a_tied_lm_head_is_the_embedding(kinds_of, adapter, base):
    weight = values(VOCAB, HIDDEN)
    assert kinds_of(adapter(weight), base(embed_tokens=weight), TIED)[0] == [RowKind.LORA]


def test_a_base_in_several_files(kinds_of, adapter, base):
    weight = values(VOCAB, HIDDEN)
    folder = base(lm_head=weight)
    (folder / "model.safetensors").rename(folder / "model-2.safetensors")
    index = {"weight_map": {"lm_head.weight": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert kinds_of(adapter(weight), folder)[0] == [RowKind.LORA]


@pytest.mark.parametrize("content", [None, b"", b"\xff" * 16, b"\x02\0\0\0\0\0\0\0{}"])
def test_without_a_readable_base_the_copy_stays(kinds_of, adapter, tmp_path, content):
    folder = tmp_path / "base"
    folder.mkdir()
    if content is not None:
        (folder / "model.safetensors").write_bytes(content)
    assert RowKind.FULL in kinds_of(adapter(values(VOCAB, HIDDEN)), folder)[0]


def test_what_was_left_out_for_one_base_is_there_for_another(kinds_of, staged, adapter, base):
    weight = values(VOCAB, HIDDEN)
    folder = adapter(weight)
    assert kinds_of(folder, base(lm_head=weight))[0] == [RowKind.LORA]
    again = staged(folder, shapes=SHAPES, base_path=str(base(lm_head=weight)))
    assert again.was_known
    elsewhere = base(lm_head=weight).with_name("elsewhere")
    elsewhere.mkdir()
    assert kinds_of(folder, elsewhere)[0] == [RowKind.FULL, RowKind.LORA]


BIASED = BaseShapes(
    *(2, {"q_proj": (8, 12)}),
    vocab_size=VOCAB,
    hidden_size=HIDDEN,
    biased_modules=("lm_head",),
    end_paths={"lm_head": ("embed_out", "lm_head")},
)


def biased(adapter, weight, bias):
    """Return the adapter with the copies that PEFT saves of an output layer with a bias."""
    folder = adapter(weight)
    path = folder / "adapter_model.safetensors"
    save_file(load_file(path) | {"base_model.model.lm_head.base_layer.bias": bias}, path)
    return folder


@pytest.mark.parametrize("prefix", ["", "_orig_mod."])
def test_the_bias_of_the_output_layer_is_left_out_with_its_weight(
    kinds_of, adapter, tmp_path, prefix
):
    weight, bias = values(VOCAB, HIDDEN), values(VOCAB)
    folder = tmp_path / "base"
    folder.mkdir()
    own = {f"{prefix}lm_head.weight": weight, f"{prefix}lm_head.bias": bias}
    save_file(own, folder / "model.safetensors")
    found, warnings = kinds_of(biased(adapter, weight, bias), folder, BIASED)
    assert found == [RowKind.LORA]
    assert len(warnings) == 2


def test_another_bias_is_refused_where_only_lora_is_served(kinds_of, adapter, tmp_path):
    weight, bias = values(VOCAB, HIDDEN), values(VOCAB)
    folder = tmp_path / "base"
    folder.mkdir()
    own = {"lm_head.weight": weight, "lm_head.bias": bias + 1}
    save_file(own, folder / "model.safetensors")
    with pytest.raises(UnsupportedFeatureError, match=naming("lm_head")):
        kinds_of(biased(adapter, weight, bias), folder, BIASED)


def end(kind, module="embed_tokens", **tensors):
    raws = {
        name: RawTensor(
            {"f": "F32", "i": "I64", "u": "BF16"}[array.dtype.kind], array.shape, array.tobytes()
        )
        for name, array in tensors.items()
    }
    return CanonicalRow(None, module, None, kind, 1.0, raws, module)


def joined(*rows, shapes=SHAPES):
    kept, dropped = base_copies.without_base_copies(rows, None, shapes)
    assert dropped == ()
    return {(row.module, row.kind, *row.tensors): row for row in kept}


def trained(module="embed_tokens", *tokens, dtype="f4"):
    weight = np.full((len(tokens), HIDDEN), 9, dtype)
    return end(RowKind.TOKENS, module, indices=np.array(tokens, "i8"), weight=weight)


def test_trained_tokens_are_put_into_a_copy():
    copy = values(VOCAB, HIDDEN)
    found = joined(end(RowKind.FULL, base=copy), trained("embed_tokens", 3, 7))
    (row,) = found.values()
    expected = copy.copy()
    expected[[3, 7]] = 9
    np.testing.assert_array_equal(row.tensors["base"].array(), expected)


def test_types_of_a_copy_and_its_tokens_are_joined_in_the_wider_one():
    copy = np.full((VOCAB, HIDDEN), 0x3F80, "u2")  # 1.0 in bfloat16
    (row,) = joined(end(RowKind.FULL, base=copy), trained("embed_tokens", 1)).values()
    array = row.tensors["base"].array()
    assert (array.dtype, array[0, 0], array[1, 0]) == (np.float32, 1, 9)


def test_tied_tokens_are_one_change_of_both_ends():
    rows = [trained("embed_tokens", 3), trained("lm_head", 3)]
    assert list(joined(*rows, shapes=TIED)) == [("embed_tokens", "tokens", "indices", "weight")]
    assert len(joined(*rows)) == 2
    copies = [
        end(RowKind.FULL, module, base=values(VOCAB, HIDDEN))
        for module in ("embed_tokens", "lm_head")
    ]
    assert list(joined(*rows, *copies, shapes=TIED)) == [("embed_tokens", "full", "base")]


def test_a_copy_under_a_trained_weight_matters_for_the_tied_end_alone():
    both = end(RowKind.FULL, weight=values(VOCAB, HIDDEN), base=values(VOCAB, HIDDEN, seed=2))
    assert list(joined(both)) == [("embed_tokens", "full", "weight")]
    assert list(joined(both, shapes=TIED)) == [
        ("embed_tokens", "full", "weight"),
        ("lm_head", "full", "base"),
    ]


def test_a_token_that_the_copy_does_not_have():
    with pytest.raises(AdapterMismatchError, match=f"token {VOCAB}"):
        joined(end(RowKind.FULL, base=values(VOCAB, HIDDEN)), trained("embed_tokens", VOCAB))


@pytest.mark.parametrize("is_same", [True, False])
def test_an_examination_names_the_copies_that_are_left_out(base, adapter, tmp_path, is_same):
    weight = values(VOCAB, HIDDEN)
    folder = adapter(weight if is_same else weight + 1)
    request = StageRequest(
        request_id=1,
        path=str(folder),
        state_dir=str(tmp_path / "state"),
        shapes=SHAPES,
        base_path=str(base(lm_head=weight)),
    )
    found = {t.name: t for t in examine(request).tensors}
    copy = found["base_model.model.lm_head.base_layer.weight"]
    assert (copy.applied, copy.refused) == (not is_same, False)
    assert (copy.reason is not None and "left out" in copy.reason) == is_same
    assert sum(tensor.applied for tensor in found.values()) == (2 if is_same else 3)
