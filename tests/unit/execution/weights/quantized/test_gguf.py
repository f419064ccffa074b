"""GGUF files: blocks decoded to the bit, models described as folders, hostile files refused."""

import json
import re
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from loraplex.core.errors import ConfigError, UnsupportedModelError
from loraplex.core.gguf import BlockType, read_gguf
from loraplex.demo import BASE_PATH
from loraplex.execution.weights.checkpoint import Checkpoint
from loraplex.execution.weights.gguf_folder import gguf_folder
from loraplex.execution.weights.quantized.gguf_blocks import decoded_blocks
from loraplex.execution.weights.quantized.stored_weight import StoredWeight
from loraplex.execution.weights.stored_head import read_model
from loraplex.models.parameters import checkpoint_shapes
from loraplex.text.tokenizer import load_tokenizer
from support.gguf_files import TYPES, decode, field, gguf_bytes, gguf_of_llama, random_blocks

ARCHITECTURE = {"general.architecture": "llama"}


@pytest.fixture(scope="module")
def content() -> bytes:
    return gguf_of_llama(BASE_PATH)


@pytest.fixture
def file(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / "files" / "tiny-Q8_0.gguf"
    path.parent.mkdir()
    path.write_bytes(content)
    return path


def write(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("kind", TYPES)
def test_blocks_are_decoded_to_the_bit(kind: str, tmp_path: Path) -> None:
    rows = random_blocks(kind, 3, 512)
    tensors = {"w": (kind, (3, 512), rows.tobytes()), "v": ("F32", (2,), bytes(8))}
    read = read_gguf(write(tmp_path, gguf_bytes(ARCHITECTURE, tensors)))
    tensor = read.tensors["w"]
    assert (tensor.kind.name, tensor.shape) == (kind, (3, 512))
    found = decoded_blocks("w", read.bytes_of("w"), tensor.kind, tensor.shape)
    decoded = found.decoded() if isinstance(found, StoredWeight) else found.float()
    assert torch.equal(decoded, decode(kind, rows))


def test_every_type_is_tested() -> None:
    assert {kind.name for kind in BlockType} == TYPES.keys()


def test_metadata(tmp_path: Path) -> None:
    metadata: dict[str, Any] = {"a": 7, "b": True, "c": 1.5, "d": "text", "e": [1, -2]}
    read = read_gguf(write(tmp_path, gguf_bytes(metadata | {"f": ["x", ""]}, {})))
    assert read.metadata == metadata | {"f": ["x", ""]}


def test_a_model_is_the_one_it_was_made_of(file: Path, tmp_path: Path) -> None:
    folder = gguf_folder(file, tmp_path / "folders")
    spec, wanted = read_model(folder), read_model(BASE_PATH)
    assert spec.layers == wanted.layers
    assert (spec.vocab_size, spec.eos_token_ids) == (wanted.vocab_size, wanted.eos_token_ids)
    with Checkpoint(folder, spec) as found, Checkpoint(BASE_PATH, wanted) as original:
        for name in checkpoint_shapes(wanted):
            tensor = original.read(name).float()
            error = (found.read(name).float() - tensor).norm() / tensor.norm()
            assert error < (0.01 if tensor.dim() == 2 else 1e-6), name


def test_transformers_reads_the_same_weights(file: Path, tmp_path: Path) -> None:
    """It decodes blocks, and undoes the order of rows of q and k, by code of its own and gguf's."""
    folder = gguf_folder(file, tmp_path / "folders")
    spec = read_model(folder)
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )
    wanted = model.state_dict()
    with Checkpoint(folder, spec) as found:
        for name in checkpoint_shapes(spec):
            assert torch.equal(found.read(name).float(), wanted[name]), name


def test_the_tokenizer_gives_the_same_tokens(file: Path, tmp_path: Path) -> None:
    found = load_tokenizer(gguf_folder(file, tmp_path / "folders"))
    wanted = load_tokenizer(BASE_PATH)
    for text in ("The capital of France is", "  two  spaces\n", "巴黎 é 12345", "<s>a</s>"):
        assert found.encode(text) == wanted.encode(text)
        assert found.decode(found.encode(text)) == wanted.decode(wanted.encode(text))
    assert (found.bos_token_id, found.eos_token_id) == (wanted.bos_token_id, wanted.eos_token_id)


def test_a_tokenizer_in_the_folder_of_the_file_is_taken(file: Path, tmp_path: Path) -> None:
    own = (BASE_PATH / "tokenizer.json").read_text()
    (file.parent / "tokenizer.json").write_text(own)
    folder = gguf_folder(file, tmp_path / "folders")
    assert (folder / "tokenizer.json").read_text() == own
    (file.parent / "tokenizer.json").unlink()
    assert gguf_folder(file, tmp_path / "folders") == folder
    assert (folder / "tokenizer.json").read_text() != own


def test_files_that_the_folder_of_the_file_lost_do_not_stay(file: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "special_tokens_map.json", "chat_template.jinja"):
        (file.parent / name).write_text("{}")
    folder = gguf_folder(file, tmp_path / "folders")
    assert (folder / "special_tokens_map.json").is_file()
    for name in ("tokenizer.json", "special_tokens_map.json", "chat_template.jinja"):
        (file.parent / name).unlink()
    assert gguf_folder(file, tmp_path / "folders") == folder
    assert sorted(path.name for path in folder.iterdir()) == [
        *("config.json", "model.gguf", "tokenizer.json", "tokenizer_config.json")
    ]


def test_an_adapter_is_no_model(tmp_path: Path) -> None:
    path = write(tmp_path, gguf_bytes(ARCHITECTURE | {"general.type": "adapter"}, TENSOR))
    with pytest.raises(ConfigError, match=f"is a LoRA adapter, .* --adapter NAME={path}"):
        gguf_folder(path, tmp_path / "folders")


def test_frequencies_are_divided_by_the_factors_of_a_tensor(file: Path, tmp_path: Path) -> None:
    metadata, tensors = dict(read_gguf(file).metadata), {}
    for name, tensor in read_gguf(file).tensors.items():
        tensors[name] = (tensor.kind.name, tensor.shape, bytes(read_gguf(file).bytes_of(name)))
    factors = [1.0 + index for index in range(32)]
    tensors["rope_freqs.weight"] = ("F32", (32,), struct.pack("<32f", *factors))
    lists = {name: value for name, value in metadata.items() if isinstance(value, list)}
    kept = {name: value for name, value in metadata.items() if name not in lists}
    path = write(tmp_path, gguf_bytes(kept | lists, tensors))
    rope = read_model(gguf_folder(path, tmp_path / "folders")).layers[0].attention.rope
    assert rope is not None
    assert (rope.long_factor, rope.attention_factor) == (tuple(factors), 1.0)


TENSOR = {"w": ("Q8_0", (2, 64), bytes(2 * 68))}
WHOLE = gguf_bytes(ARCHITECTURE, TENSOR)
HOSTILE = {
    "another file": (b"GGML" + WHOLE[4:], "is no GGUF file"),
    "nothing": (b"", "cut off"),
    "a version": (b"GGUF" + struct.pack("<I", 1) + WHOLE[8:], "version 1 of GGUF"),
    "absurd tensors": (WHOLE[:8] + struct.pack("<Q", 1 << 60) + WHOLE[16:], "cannot hold"),
    "absurd metadata": (WHOLE[:16] + struct.pack("<Q", 1 << 60) + WHOLE[24:], "cannot hold"),
    "a name": (WHOLE[:24] + struct.pack("<Q", 1 << 40) + WHOLE[32:], "a name of 1099511627776"),
    "cut off in a tensor": (WHOLE[:-64], "it ends within tensor w"),
    "cut off in the header": (WHOLE[:60], "cut off"),
    "twice": (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + 2 * field("general.architecture", "llama"),
        "is there twice",
    ),
    "a nested list": (
        b"GGUF"
        + struct.pack("<IQQ", 3, 0, 1)
        + struct.pack("<Q", 1)
        + b"x"
        + struct.pack("<IIQ", 9, 9, 1)
        + bytes(64),
        "type 9 is not known",
    ),
    "a type": (WHOLE.replace(struct.pack("<IQ", 8, 0), struct.pack("<IQ", 10, 0)), "Q2_K"),
    "part of a block": (gguf_bytes({}, {"w": ("Q4_K", (1, 128), bytes(144))}), "cannot be Q4_K"),
    "an offset": (
        WHOLE.replace(struct.pack("<IQ", 8, 0), struct.pack("<IQ", 8, 1 << 62)),
        "it ends within tensor w",
    ),
    "an alignment": (gguf_bytes({"general.alignment": 0}, TENSOR), "is no alignment"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files(name: str, tmp_path: Path) -> None:
    content, message = HOSTILE[name]
    path = write(tmp_path, content)
    with pytest.raises((ConfigError, UnsupportedModelError), match=message) as raised:
        read_gguf(path)
    assert str(path) in str(raised.value)


def test_files_cut_off_anywhere_are_refused(tmp_path: Path) -> None:
    # The last 24 bytes are padding.
    for end in range(len(WHOLE) - 24):
        with pytest.raises(ConfigError):
            read_gguf(write(tmp_path, WHOLE[:end]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general.architecture": "mamba"}, "architecture 'mamba' of GGUF is not supported"),
        ({"llama.block_count": 0}, "llama.block_count must be an integer of at least 1, got 0"),
        ({"llama.block_count": 1 << 31}, "block_count is 2147483648, but the file has"),
        ({"llama.embedding_length": "x"}, "llama.embedding_length must be an integer"),
        ({"tokenizer.ggml.pre": "odd"}, "pre 'odd' is not supported"),
        ({"tokenizer.ggml.model": "bert"}, "tokenizer 'bert' of GGUF is not supported"),
        ({"tokenizer.ggml.bos_token_id": 9999}, "9999 is no id of 1024 tokens"),
        ({"tokenizer.ggml.merges": ["a nowhere"]}, "merges has 'a nowhere'"),
        ({"tokenizer.ggml.token_type": [1, 2]}, "for each token"),
    ],
)
def test_models_that_are_refused(
    changes: dict[str, Any], message: str, file: Path, tmp_path: Path
) -> None:
    read = read_gguf(file)
    tensors = {
        name: (tensor.kind.name, tensor.shape, bytes(read.bytes_of(name)))
        for name, tensor in read.tensors.items()
    }
    path = write(tmp_path, gguf_bytes({**read.metadata, **changes}, tensors))
    with pytest.raises((ConfigError, UnsupportedModelError), match=re.escape(message)):
        gguf_folder(path, tmp_path / "folders")


def test_a_first_token_that_cannot_be_put_before_texts(file: Path, tmp_path: Path) -> None:
    # In the templates of the tokenizers library $ begins a name.
    path = write(tmp_path, file.read_bytes().replace(b"<s>", b"$s>"))
    with pytest.raises(ConfigError, match=re.escape("['$s>'] cannot be put around texts")):
        gguf_folder(path, tmp_path / "folders")


def test_what_the_folder_has(file: Path, tmp_path: Path) -> None:
    folder = gguf_folder(file, tmp_path / "folders")
    assert (folder / "model.gguf").resolve() == file
    assert json.loads((folder / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert sorted(path.name for path in (tmp_path / "folders").iterdir()) == [folder.name]
