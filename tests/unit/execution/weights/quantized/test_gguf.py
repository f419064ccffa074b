"""GGUF files: blocks decoded to the bit, models described as folders, hostile files refused."""

import json
import os
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from loraplex.core.errors import ConfigError, UnsupportedModelError
from loraplex.core.gguf import BlockType, GgufFile, read_gguf
from loraplex.demo import BASE_PATH
from loraplex.execution.weights import gguf_folder as gguf_folders
from loraplex.execution.weights.checkpoint import Checkpoint
from loraplex.execution.weights.gguf_folder import gguf_folder
from loraplex.execution.weights.loading import checkpoint_digest
from loraplex.execution.weights.quantized.gguf import decoded_blocks
from loraplex.execution.weights.quantized.stored_weight import StoredWeight
from loraplex.execution.weights.stored_head import read_model
from loraplex.execution.weights.weight_files import weight_files
from loraplex.models.parameters import checkpoint_shapes
from loraplex.serving.text.chat_template_files import find_templates
from loraplex.text.tokenizer import load_tokenizer
from support.gguf_files import (
    TYPES,
    decode,
    field,
    gguf_bytes,
    gguf_of_llama,
    random_blocks,
    split_gguf,
)
from support.naming import naming

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


def changed(file: Path, tmp_path: Path, changes: dict[str, Any]) -> Path:
    """Write a file with other metadata; None removes it."""
    read = read_gguf(file)
    tensors = {
        name: (tensor.kind.name, tensor.shape, bytes(read.bytes_of(name)))
        for name, tensor in read.tensors.items()
    }
    metadata = {**read.metadata, **changes}
    kept = {name: value for name, value in metadata.items() if value is not None}
    return write(tmp_path, gguf_bytes(kept, tensors))


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


def test_a_folder_is_made_once(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a change of one of its files, or of the file itself, makes it anew."""
    folder = gguf_folder(file, tmp_path / "folders")
    wanted = (folder / "config.json").read_text()
    readings: list[Path] = []

    def note(path: Path) -> GgufFile:
        readings.append(path)
        return read_gguf(path)

    monkeypatch.setattr(gguf_folders, "read_gguf", note)
    assert gguf_folder(file, tmp_path / "folders") == folder
    assert readings == []
    (folder / "config.json").write_text("{}")
    for _ in range(2):
        assert gguf_folder(file, tmp_path / "folders") == folder
        assert (folder / "config.json").read_text() == wanted
    assert readings == [file]
    (folder / "tokenizer.json").unlink()
    gguf_folder(file, tmp_path / "folders")
    assert (folder / "tokenizer.json").exists()
    os.utime(file)
    gguf_folder(file, tmp_path / "folders")
    assert readings == [file] * 3


def test_an_adapter_is_no_model(tmp_path: Path) -> None:
    path = write(tmp_path, gguf_bytes(ARCHITECTURE | {"general.type": "adapter"}, TENSOR))
    with pytest.raises(ConfigError, match=naming("LoRA", "--adapter", f"NAME={path}")):
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
    rope = read_model(gguf_folder(path, tmp_path / "folders")).layers[0].mixer.rope
    assert rope is not None
    assert (rope.long_factor, rope.attention_factor) == (tuple(factors), 1.0)


@pytest.fixture
def parts(file: Path) -> list[Path]:
    return split_gguf(file, 3)


def test_a_split_model_is_served_from_any_part(
    file: Path, parts: list[Path], tmp_path: Path
) -> None:
    whole, folder = (gguf_folder(path, tmp_path / "folders") for path in (file, parts[0]))
    assert [gguf_folder(part, tmp_path / "folders") for part in parts[1:]] == [folder, folder]
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (folder / name).read_text() == (whole / name).read_text()
    assert [link.resolve() for link in weight_files(folder)] == parts
    spec = read_model(folder)
    with Checkpoint(folder, spec) as found, Checkpoint(whole, spec) as wanted:
        for name in checkpoint_shapes(spec):
            assert torch.equal(found.read(name), wanted.read(name)), name


def test_a_changed_part_is_another_checkpoint(parts: list[Path], tmp_path: Path) -> None:
    files = weight_files(gguf_folder(parts[0], tmp_path / "folders"))
    digest = checkpoint_digest(files)
    content = bytearray(parts[2].read_bytes())
    content[-64] ^= 1
    parts[2].write_bytes(content)
    assert checkpoint_digest(files) != digest


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_missing_part_is_named(missing: int, parts: list[Path], tmp_path: Path) -> None:
    parts[missing].unlink()
    for given in parts:
        message = f"model of 3 files, of which 1 are missing .*: {parts[missing].name}"
        with pytest.raises(ConfigError, match=message):
            gguf_folder(given, tmp_path / "folders")


def test_parts_that_are_not_of_one_split(file: Path, parts: list[Path], tmp_path: Path) -> None:
    first, second, _ = (part.read_bytes() for part in parts)
    parts[2].write_bytes(second)
    with pytest.raises(ConfigError, match=naming("split.count", 3, "split.no", 1, 2)):
        read_gguf(parts[0])
    parts[2].write_bytes(file.read_bytes())
    with pytest.raises(ConfigError, match=naming("split.count", "None", "split.no")):
        read_gguf(parts[0])
    (tmp_path / "renamed.gguf").write_bytes(first)
    with pytest.raises(ConfigError, match=naming("split.count", 3)):
        read_gguf(tmp_path / "renamed.gguf")
    twice = second.replace(field("split.no", 1), field("split.no", 2))
    parts[2].write_bytes(twice)
    with pytest.raises(
        ConfigError, match=naming("tiny-00002-of-00003.gguf", "blk.1.ffn_gate.weight")
    ):
        read_gguf(parts[0])


def test_a_count_of_tensors_that_is_wrong(parts: list[Path]) -> None:
    content = parts[0].read_bytes()
    at = content.index(b"split.tensors.count") + len("split.tensors.count") + 4
    parts[0].write_bytes(content[:at] + struct.pack("<I", 999) + content[at + 4 :])
    with pytest.raises(ConfigError, match=naming("split.tensors.count", 999, 3)):
        read_gguf(parts[1])


def test_one_part_alone_is_a_whole_file(file: Path, tmp_path: Path) -> None:
    (only,) = split_gguf(file, 1)
    assert read_gguf(only).tensors.keys() == read_gguf(file).tensors.keys()
    assert [path.name for path in weight_files(gguf_folder(only, tmp_path / "folders"))] == [
        "model.gguf"
    ]


def test_a_link_of_the_hubs_cache_keeps_its_name(
    file: Path, parts: list[Path], tmp_path: Path
) -> None:
    snapshot = tmp_path / "snapshots" / "commit"
    snapshot.mkdir(parents=True)
    for number, part in enumerate([*parts, file]):
        blob = tmp_path / f"{number:064x}"
        part.rename(blob)
        (snapshot / part.name).symlink_to(blob)
    shutil.copy(BASE_PATH / "tokenizer.json", snapshot)
    split, whole = (
        gguf_folder(snapshot / path.name, tmp_path / "folders") for path in (parts[1], file)
    )
    assert split.name.startswith("tiny-")
    assert whole.name.startswith("tiny-Q8_0-")
    assert read_model(split).layers == read_model(whole).layers
    own = (BASE_PATH / "tokenizer.json").read_text()
    assert (split / "tokenizer.json").read_text() == own


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
    "a type": (WHOLE.replace(struct.pack("<IQ", 8, 0), struct.pack("<IQ", 21, 0)), "IQ3_S"),
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
    ("changes", "named"),
    [
        ({"general.architecture": "mamba"}, ("mamba", "GGUF")),
        ({"llama.block_count": 0}, ("llama.block_count", 1, 0)),
        ({"llama.block_count": 1 << 31}, ("llama.block_count", 2147483648)),
        ({"llama.embedding_length": "x"}, ("llama.embedding_length",)),
        ({"general.architecture": None}, ("general.architecture",)),
        ({"tokenizer.ggml.pre": "odd"}, ("odd", "tokenizer.ggml.pre")),
        ({"tokenizer.ggml.pre": None}, ("tokenizer.ggml.pre", "llama.cpp")),
        ({"tokenizer.ggml.pre": "default"}, ("tokenizer.json", "tokenizer.ggml.pre", "default")),
        ({"tokenizer.ggml.model": "bert"}, ("tokenizer.ggml.model", "bert")),
        (
            {"tokenizer.ggml.model": None},
            ("tokenizer.ggml.model", "gpt2"),
        ),
        ({"tokenizer.ggml.bos_token_id": 9999}, (9999, 1024, "tokenizer.ggml.bos_token_id")),
        ({"tokenizer.ggml.eot_token_id": 9999}, ("tokenizer.ggml.eot_token_id", 9999, 1024)),
        ({"tokenizer.chat_template.tool_use": 7}, ("tokenizer.chat_template.tool_use",)),
        ({"tokenizer.ggml.merges": ["a nowhere"]}, ("a nowhere", "tokenizer.ggml.merges")),
        (
            {"tokenizer.ggml.token_type": [1, 2]},
            ("tokenizer.ggml.token_type", "[1, 2, 3, 4, 5, 6]"),
        ),
    ],
)
def test_models_that_are_refused(
    changes: dict[str, Any], named: tuple[object, ...], file: Path, tmp_path: Path
) -> None:
    path = changed(file, tmp_path, changes)
    with pytest.raises((ConfigError, UnsupportedModelError), match=naming(*named)):
        gguf_folder(path, tmp_path / "folders")


@pytest.mark.parametrize("text", ["<|end|>", "<|eot_id|>", "<|im_end|>", "<|file_sep|>"])
@pytest.mark.parametrize("kind", [1, 3, 4])
def test_end_tokens_are_found_by_their_texts(
    text: str, kind: int, file: Path, tmp_path: Path
) -> None:
    metadata = read_gguf(file).metadata
    texts, kinds = (list(metadata[f"tokenizer.ggml.{key}"]) for key in ("tokens", "token_type"))
    texts[3], kinds[3] = text, kind
    changes = {"tokenizer.ggml.tokens": texts, "tokenizer.ggml.token_type": kinds}
    folder = gguf_folder(changed(file, tmp_path, changes), tmp_path / "folders")
    assert read_model(folder).eos_token_ids == (metadata["tokenizer.ggml.eos_token_id"], 3)
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode(f"a{text}b", add_special_tokens=False)[1] == 3
    assert tokenizer.is_special(3)


@pytest.mark.parametrize("role", ["eot", "eom", "fim_pad", "fim_rep", "fim_sep"])
def test_end_tokens_with_a_role(role: str, file: Path, tmp_path: Path) -> None:
    path = changed(file, tmp_path, {f"tokenizer.ggml.{role}_token_id": 9})
    spec = read_model(gguf_folder(path, tmp_path / "folders"))
    assert spec.eos_token_ids == (read_gguf(file).metadata["tokenizer.ggml.eos_token_id"], 9)


TEMPLATES = {"tokenizer.chat_template": "usual", "tokenizer.chat_template.tool_use": "with tools"}


@pytest.mark.parametrize("has_tokenizer", [False, True])
def test_all_chat_templates_are_taken(has_tokenizer: bool, file: Path, tmp_path: Path) -> None:
    path = changed(file, tmp_path, {**TEMPLATES, "tokenizer.chat_templates": ["tool_use"]})
    if has_tokenizer:  # in the folder of the file, without a tokenizer_config.json
        shutil.copy(BASE_PATH / "tokenizer.json", tmp_path)
    folder = gguf_folder(path, tmp_path / "folders")
    assert find_templates(folder) == {"default": "usual", "tool_use": "with tools"}
    assert load_tokenizer(folder).eos_token_id == load_tokenizer(BASE_PATH).eos_token_id


def test_templates_in_the_folder_of_the_file(file: Path, tmp_path: Path) -> None:
    (file.parent / "chat_template.jinja").write_text("own")
    (file.parent / "additional_chat_templates").mkdir()
    (file.parent / "additional_chat_templates" / "tool_use.jinja").write_text("own with tools")
    folder = gguf_folder(file, tmp_path / "folders")
    assert find_templates(folder) == {"default": "own", "tool_use": "own with tools"}
    (file.parent / "additional_chat_templates" / "tool_use.jinja").unlink()
    assert find_templates(gguf_folder(file, tmp_path / "folders")) == {"default": "own"}


def test_a_first_token_that_cannot_be_put_before_texts(file: Path, tmp_path: Path) -> None:
    # In the templates of the tokenizers library $ begins a name.
    path = write(tmp_path, file.read_bytes().replace(b"<s>", b"$s>"))
    with pytest.raises(ConfigError, match=naming("['$s>']")):
        gguf_folder(path, tmp_path / "folders")


def test_what_the_folder_has(file: Path, tmp_path: Path) -> None:
    folder = gguf_folder(file, tmp_path / "folders")
    assert (folder / "model.gguf").resolve() == file
    assert json.loads((folder / "config.json").read_text())["torch_dtype"] == "bfloat16"
    folders = sorted(path.name for path in (tmp_path / "folders").iterdir())
    assert folders == ["seen", folder.name]
