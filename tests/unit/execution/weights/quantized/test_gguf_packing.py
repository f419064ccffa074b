"""Weights packed from blocks of a GGUF file: the bytes of a packing by way of torch, on a rank."""

from pathlib import Path

import pytest
import torch

from loraplex.demo import BASE_PATH
from loraplex.execution.weights.gguf_folder import gguf_folder
from loraplex.execution.weights.packing import PackedWeights, WeightFormat, pack_checkpoint
from loraplex.execution.weights.stored_head import read_model
from loraplex.kernels.native.backend import NativeKernels
from loraplex.kernels.native.library import LIBRARY_FOLDER, load_library
from loraplex.models.linear_group import TensorShard
from loraplex.models.sharding import shard
from loraplex.models.spec import ModelSpec
from support.gguf_files import gguf_of_llama

pytestmark = pytest.mark.skipif(
    not LIBRARY_FOLDER.exists(), reason="loraplex was installed without a compiler"
)

FORM = WeightFormat(dtype=torch.bfloat16)
MIXES: dict[str, dict[str, str]] = {
    "Q8_0": {},
    "Q4_0": {"proj": "Q4_0"},
    "Q5_1 and Q8_0": {"v_proj": "Q5_1", "up_proj": "Q5_1"},
    "IQ4_NL and Q4_1": {"v_proj": "Q4_1", "down_proj": "Q4_1", "proj": "IQ4_NL"},
    "Q4_K and Q5_0": {"v_proj": "Q5_0", "proj": "Q4_K"},
}


def pack(folder: Path, spec: ModelSpec, kernels: NativeKernels) -> PackedWeights:
    return pack_checkpoint(folder, spec, kernels, FORM, shows_progress=False)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("mix", MIXES)
def test_the_bytes_on_each_rank(
    mix: str, num_ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels, through_torch = (NativeKernels(load_library(), 2) for _ in range(2))
    monkeypatch.setattr(through_torch, "pack_blocks", lambda *_: None)
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_of_llama(BASE_PATH, MIXES[mix]))
    folder = gguf_folder(path, tmp_path / "folders")
    whole = read_model(folder)
    for rank in range(num_ranks):
        spec = shard(whole, TensorShard(rank, num_ranks)) if num_ranks > 1 else whole
        found = pack(folder, spec, kernels)
        wanted = pack(folder, spec, through_torch)
        # The first two are the embedding, packed and as a tensor.
        assert len(found.entries) == len(wanted.entries)
        for own, other in zip(found.entries[2:], wanted.entries[2:], strict=True):
            assert own.numbers == other.numbers
            for tensor, as_before in zip(own.tensors, other.tensors, strict=True):
                assert (tensor is None) == (as_before is None)
                assert tensor is None or as_before is None or torch.equal(tensor, as_before)
        assert found.parameters.packed_embedding is not None
        assert wanted.parameters.packed_embedding is None
        rows = torch.tensor([1023, 0, 500])
        embedding = found.parameters.packed_embedding
        numbers = kernels.weight_rows(embedding, rows, torch.bfloat16)
        assert torch.equal(numbers, wanted.parameters.embedding[rows])
