"""A stored output layer wins over tie_word_embeddings; one that is the embedding stays tied."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest
import torch
from safetensors.torch import save_file

from loraplex.execution.weights.checkpoint import Checkpoint
from loraplex.execution.weights.loading import load_weights
from loraplex.execution.weights.packed_cache import PackedCache
from loraplex.execution.weights.packing import WeightFormat
from loraplex.execution.weights.stored_head import read_model
from loraplex.kernels.reference import ReferenceKernels
from support.tiny_model import TinyCheckpoint
from support.trtllm_checkpoint import write_trtllm_checkpoint

HEAD: Final = "lm_head.weight"
EMBEDDING: Final = "model.embed_tokens.weight"
KERNELS: Final = ReferenceKernels(torch.device("cpu"))
FORM: Final = WeightFormat(dtype=torch.float32)


@pytest.fixture
def tied(tmp_path: Path) -> TinyCheckpoint:
    return TinyCheckpoint(tmp_path, tie_word_embeddings=True)


def one_file(tied: TinyCheckpoint) -> Path:
    return tied.save()


def language_model_files(tied: TinyCheckpoint) -> Path:
    """The names of a multimodal wrapper's file."""
    tensors = {name.removeprefix("model."): tensor for name, tensor in tied.tensors.items()}
    save_file(tensors, tied.folder / "model.safetensors")
    return tied.folder


def shards(tied: TinyCheckpoint) -> Path:
    names = {True: "model-1.safetensors", False: "model-2.safetensors"}
    for is_head, file in names.items():
        part = {name: t for name, t in tied.tensors.items() if (name == HEAD) is is_head}
        save_file(part, tied.folder / file)
    weight_map = {name: names[name == HEAD] for name in tied.tensors}
    index = tied.folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    return tied.folder


def pickled(tied: TinyCheckpoint) -> Path:
    torch.save(tied.tensors, tied.folder / "pytorch_model.bin")
    return tied.folder


def of_tensorrt_llm(tied: TinyCheckpoint) -> Path:
    folder = tied.folder / "ranks"
    write_trtllm_checkpoint(
        folder, tied.config, tied.tensors, tp_size=2, share_embedding_table=True
    )
    return folder


LAYOUTS: Final = [one_file, language_model_files, shards, pickled, of_tensorrt_llm]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_head_that_differs_wins(
    tied: TinyCheckpoint, layout: Callable[[TinyCheckpoint], Path]
) -> None:
    head = tied.tensors[EMBEDDING].clone()
    head[-1, -1] += 1
    tied.tensors[HEAD] = head
    folder = layout(tied)
    spec = read_model(folder)
    assert not spec.tie_word_embeddings
    with Checkpoint(folder, spec) as checkpoint:
        assert torch.equal(checkpoint.read(HEAD), head)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_equal_head_stays_tied(
    tied: TinyCheckpoint, layout: Callable[[TinyCheckpoint], Path]
) -> None:
    tied.tensors[HEAD] = tied.tensors[EMBEDDING].clone()
    folder = layout(tied)
    spec = read_model(folder)
    assert spec.tie_word_embeddings
    with Checkpoint(folder, spec) as checkpoint:
        assert len(checkpoint) == len(tied.tensors) - 1


def test_values_count_rather_than_their_type(tied: TinyCheckpoint) -> None:
    tied.tensors[EMBEDDING] = tied.tensors[EMBEDDING].bfloat16()
    tied.tensors[HEAD] = tied.tensors[EMBEDDING].float()
    assert read_model(tied.save()).tie_word_embeddings


def test_a_head_with_fewer_rows_is_not_ignored(tied: TinyCheckpoint) -> None:
    tied.tensors[HEAD] = tied.tensors[EMBEDDING][:-1].clone()
    assert not read_model(tied.save()).tie_word_embeddings


@pytest.mark.parametrize("content", [None, b"", b"no header"])
def test_weights_that_cannot_be_read_are_left_to_the_loader(
    tied: TinyCheckpoint, content: bytes | None
) -> None:
    if content is not None:
        (tied.folder / "model.safetensors").write_bytes(content)
    assert read_model(tied.folder).tie_word_embeddings


def test_the_packed_cache_holds_the_head(tied: TinyCheckpoint, tmp_path: Path) -> None:
    cache = PackedCache(tmp_path / "cache", 1 << 30, min_free_bytes=0)
    cache.folder.mkdir()
    tied.tensors[HEAD] = 2 * tied.tensors[EMBEDDING]
    tied.save()
    for _ in range(2):
        weights = load_weights(tied.folder, read_model(tied.folder), KERNELS, FORM, cache)
        head, _ = KERNELS.linear_parts(weights.parameters.lm_head).tensors
        assert head is not None
        assert torch.equal(head, tied.tensors[HEAD])
        if weights.storing is not None:
            weights.storing.wait()
    assert len(list(cache.folder.glob("*.weights"))) == 1
