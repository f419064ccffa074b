"""Blocks of GGUF files read by native kernels: the bytes that torch's decoders and packing give."""

import dataclasses

import pytest
import torch

from loraplex.core.errors import ConfigError
from loraplex.core.gguf import BlockType
from loraplex.execution.weights.quantized.gguf import decoded_blocks
from loraplex.execution.weights.quantized.packable import (
    in_super_blocks,
    packable,
    stacked_experts,
)
from loraplex.execution.weights.quantized.stored_weight import StoredWeight
from loraplex.kernels.block_rows import BlockRows, joined_rows
from loraplex.kernels.native.gguf import NativeGguf
from loraplex.kernels.native.library import LIBRARY_FOLDER, ThreadPool, load_library
from loraplex.kernels.native.linear import NativeLinear, NativeWeight, WeightKind
from support.gguf_files import random_blocks
from unit.kernels.test_native_quantized_linear import instruction_sets

pytestmark = pytest.mark.skipif(
    not LIBRARY_FOLDER.exists(), reason="loraplex was installed without a compiler"
)

BIAS = torch.arange(200.0)
MIXES = [
    *(("Q2_K",), ("Q3_K",), ("Q4_K",), ("Q5_K",), ("Q6_K",)),
    *(("Q4_K", "Q6_K"), ("Q4_K", "Q5_K"), ("Q6_K", "Q6_K")),
    *(("Q2_K", "Q3_K"), ("Q3_K", "Q4_K", "Q2_K"), ("Q3_K", "Q5_K"), ("Q6_K", "Q2_K")),
]
GROUPS = {
    ("Q4_0",): "INT4_BY_INT8",
    ("Q4_1",): "INT4_OFFSETS",
    ("Q5_0",): "INT8_BY_INT8",
    ("Q5_1",): "INT8_OFFSETS",
    ("Q8_0",): "INT8_BY_INT8",
    ("IQ4_NL",): "TABLE4",
    ("IQ4_XS",): "TABLE4",
    ("MXFP4",): "TABLE4",
    ("IQ4_XS", "IQ4_NL"): "TABLE4",
    ("Q4_0", "Q8_0"): "INT8_BY_INT8",
    ("Q4_0", "Q4_1"): "INT4_OFFSETS",
    ("Q4_0", "Q5_1"): "INT8_OFFSETS",
    ("IQ4_XS", "Q5_0"): "INT8_BY_INT8",
    ("MXFP4", "IQ4_NL", "Q4_1"): "INT8_OFFSETS",
}
SIZES = ((40, 256, 0), (130, 1024, 4), (3, 96, 1), (17, 512, 2))


@dataclasses.dataclass
class Kernels:
    linear: NativeLinear
    gguf: NativeGguf


@pytest.fixture(params=instruction_sets())
def kernels(request: pytest.FixtureRequest) -> Kernels:
    library = load_library([request.param])
    pool = ThreadPool(library, 2)
    return Kernels(NativeLinear(library, pool), NativeGguf(library, pool))


def both(kind: str, num_rows: int, num_inputs: int) -> tuple[BlockRows, StoredWeight]:
    """Return random rows where they lie, and as torch decodes them."""
    data = bytearray(random_blocks(kind, num_rows, num_inputs).tobytes())
    shape, block_type = (num_rows, num_inputs), BlockType[kind]
    stored = decoded_blocks("w", data, block_type, shape)
    assert isinstance(stored, StoredWeight)
    return BlockRows.of(torch.frombuffer(data, dtype=torch.uint8), block_type, shape), stored


def evens_first(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat([tensor[::2], tensor[1::2]])


def assert_same(found: NativeWeight | None, wanted: NativeWeight) -> None:
    assert found is not None
    assert dataclasses.replace(found, panels=None, bias=None) == dataclasses.replace(
        wanted, panels=None, bias=None
    )
    assert torch.equal(found.panels, wanted.panels)
    assert (found.bias is None) == (wanted.bias is None)
    assert found.bias is None or wanted.bias is None or torch.equal(found.bias, wanted.bias)


@pytest.mark.parametrize("kinds", MIXES)
def test_the_bytes_of_a_packing_by_torch(kernels: Kernels, kinds: tuple[str, ...]) -> None:
    """Panels that are full, and one that is not; rows in another order, as those of heads."""
    for num_rows, num_inputs, num_blocks in ((40, 256, 0), (130, 1024, 2), (3, 512, 1)):
        parts = [both(kind, num_rows, num_inputs) for kind in kinds]
        rows = joined_rows([one.rows(evens_first) for one, _ in parts])
        stored = [one.rows(evens_first) for _, one in parts]
        weight = in_super_blocks(stored, max(1, num_blocks))
        assert weight is not None
        bias = BIAS[: num_rows * len(kinds)] if num_blocks == 1 else None
        found = kernels.gguf.pack(rows, bias, num_blocks)
        assert_same(found, kernels.linear.pack(weight, bias, num_blocks=num_blocks))


@pytest.mark.parametrize(("kinds", "wanted"), GROUPS.items(), ids="+".join)
def test_the_bytes_of_groups_packed_by_torch(
    kernels: Kernels, kinds: tuple[str, ...], wanted: str
) -> None:
    """Full panels and others, an odd number of groups, blocks of inputs, rows in another order."""
    for num_rows, num_inputs, num_blocks in SIZES:
        if "IQ4_XS" in kinds and num_inputs % 256:
            continue
        parts = [both(kind, num_rows, num_inputs) for kind in kinds]
        rows = joined_rows([one.rows(evens_first) for one, _ in parts])
        weight = packable([one.rows(evens_first) for _, one in parts], max(1, num_blocks))
        assert weight is not None
        bias = BIAS[:1].repeat(num_rows * len(kinds)) if num_blocks == 1 else None
        found = kernels.gguf.pack(rows, bias, num_blocks)
        assert_same(found, kernels.linear.pack(weight, bias, num_blocks=num_blocks))
        assert found is not None
        assert found.kind is WeightKind[wanted]


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "IQ4_XS"])
def test_groups_of_a_share_and_of_experts(kernels: Kernels, kind: str) -> None:
    parts = [both(kind, 17, 1024) for _ in range(3)]
    weights = [packable([stored.inputs(256, 768)], 2) for _, stored in parts]
    stacked = stacked_experts([weight for weight in weights if weight is not None])
    own = joined_rows([rows for rows, _ in parts]).inputs(256, 768)
    assert stacked is not None
    assert own is not None
    found = kernels.gguf.pack(own.rows(lambda tensor: tensor.view(3, 17)), None, 2)
    assert_same(found, kernels.linear.pack(stacked, None, num_blocks=2))


@pytest.mark.parametrize("kind", ["Q8_0", "Q5_1", "Q4_0", "IQ4_NL"])
def test_rows_of_groups_are_the_numbers_of_the_file(kernels: Kernels, kind: str) -> None:
    """An embedding stays packed, and has the numbers that it has as a tensor."""
    rows, stored = both(kind, 40, 96)
    found = kernels.gguf.pack(rows, None, 0)
    indices = torch.tensor([39, 0, 17])
    assert found is not None
    for dtype in (torch.bfloat16, torch.float16):
        numbers = kernels.linear.rows(found, indices, dtype)
        assert torch.equal(numbers, stored.decoded()[indices].to(dtype))


def test_what_no_panel_holds_is_left_to_torch(kernels: Kernels) -> None:
    whole = both("Q8_0", 16, 96)[0]
    assert kernels.gguf.pack(whole, None, 2) is None, "a block would cut a group"
    assert whole.inputs(16, 96) is None, "a share would cut a group"
    for others in (("Q8_0", "Q6_K"), ("IQ4_NL", "MXFP4")):
        mixed = joined_rows([both(kind, 16, 256)[0] for kind in others])
        assert kernels.gguf.pack(mixed, None, 0) is None


def test_experts(kernels: Kernels) -> None:
    parts = [both("Q4_K", 20, 256) for _ in range(3)]
    weights = [in_super_blocks([stored], 1) for _, stored in parts]
    weight = stacked_experts([weight for weight in weights if weight is not None])
    assert weight is not None
    rows = joined_rows([rows for rows, _ in parts]).rows(lambda tensor: tensor.view(3, 20))
    bias = BIAS[:60].view(3, 20)
    assert_same(kernels.gguf.pack(rows, bias, 0), kernels.linear.pack(weight, bias))


def test_a_share_of_the_inputs(kernels: Kernels) -> None:
    rows, stored = both("Q6_K", 17, 1024)
    weight = in_super_blocks([stored.inputs(256, 768)], 2)
    own = rows.inputs(256, 768)
    assert weight is not None
    assert own is not None
    assert_same(kernels.gguf.pack(own, None, 2), kernels.linear.pack(weight, None, num_blocks=2))
    assert rows.inputs(128, 640) is None
    assert kernels.gguf.pack(own, None, 4) is None, "a block would be half a super-block"


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K", "Q6_K", "Q8_0", "Q4_1", "IQ4_XS"])
def test_a_scale_that_is_no_number_is_refused(kernels: Kernels, kind: str) -> None:
    data = torch.from_numpy(random_blocks(kind, 20, 512)).flatten().contiguous()
    place = 208 if kind == "Q6_K" else 0
    data[-BlockType[kind].num_bytes :][place : place + 2] = torch.tensor([0, 0x7C])
    rows = BlockRows.of(data, BlockType[kind], (20, 512))
    with pytest.raises(ConfigError, match="infinite"):
        kernels.gguf.pack(rows, None, 0)
