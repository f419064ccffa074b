"""What a person reads when a device's memory is too small."""

import re

import pytest
import torch

from loraplex.core.byte_sizes import readable_bytes
from loraplex.core.errors import ConfigError, StepFailedError
from loraplex.core.weight_precision import WeightPrecision
from loraplex.execution.sizing.settings import RunnerSettings
from loraplex.execution.sizing.shortage import (
    MemoryAdvice,
    is_out_of_memory,
    out_of_memory_is,
)
from loraplex.execution.sizing.step_memory import (
    StepMemory,
    bytes_per_token,
    estimated_step_memory,
)
from loraplex.execution.weights.size import weights_size
from support.naming import naming
from support.tiny_decoder import tiny_spec

MIB = 1 << 20
CONFIG = tiny_spec(hidden_size=64, intermediate_size=64, head_dim=16)
WHOLE = weights_size(CONFIG, torch.bfloat16, WeightPrecision.NATIVE)
INT8 = weights_size(CONFIG, torch.bfloat16, WeightPrecision.INT8)
INT4 = weights_size(CONFIG, torch.bfloat16, WeightPrecision.INT4)


def advice(**settings: object) -> MemoryAdvice:
    return MemoryAdvice(RunnerSettings(**settings), CONFIG, torch.bfloat16)  # type: ignore[arg-type]


class TestWeights:
    def test_every_precision_that_fits_is_named(self) -> None:
        error = advice().weights(WHOLE - 1)
        assert re.search(naming(readable_bytes(WHOLE), "int8", "int4"), error.message)
        assert f"has {readable_bytes(WHOLE - 1)} free" in error.message
        assert f"int8 ({readable_bytes(INT8)})" in error.message
        assert f"int4 ({readable_bytes(INT4)})" in error.message
        assert error.param == "quantization"

    def test_one_that_does_not_is_not(self) -> None:
        message = advice().weights(INT8).message
        assert "int8" not in message
        assert f"int4 ({readable_bytes(INT4)})" in message

    def test_nothing_helps(self) -> None:
        assert re.search(naming("121.6 KiB", "47.77 KiB"), advice().weights(INT4).message)
        quantized = advice(quantization=WeightPrecision.INT4)
        assert re.search(naming("47.77 KiB"), quantized.weights(None).message)


class TestWorkspace:
    def test_it_says_to_what(self) -> None:
        about = estimated_step_memory(RunnerSettings(), CONFIG, torch.bfloat16).workspace
        error = advice(max_num_batched_tokens=1000, max_num_seqs=40).workspace(about // 2)
        tokens, seqs = map(int, re.findall(r"_(?:tokens|seqs) to (\d+)", error.message))
        assert 200 < tokens < 260
        assert 8 <= seqs <= 10
        assert error.param == "max_num_batched_tokens"

    def test_it_is_half_at_most_and_never_nothing(self) -> None:
        unknown = advice(max_num_batched_tokens=1000).workspace(None).message
        assert "max_num_batched_tokens to 500" in unknown
        assert "max_num_seqs to 32" in unknown
        assert "free for" not in unknown
        assert re.search(
            naming("max_num_batched_tokens", 1, "max_num_seqs", 0), advice().workspace(0).message
        )


class TestGraphs:
    def test_half_of_the_sizes_or_none(self) -> None:
        error = advice(max_num_seqs=8).graphs(5)
        assert re.search(naming(8, 5, "cuda_graph_batch_sizes", 1, 2), error.message)
        assert "has 5 B free" in error.message
        assert re.search(naming("cuda_graph_batch_sizes", 1, 2, "cuda_graphs", 8, 5), error.message)
        assert error.param == "cuda_graph_batch_sizes"

    def test_one_size_has_no_half(self) -> None:
        assert re.search(naming("cuda_graphs", 1, 5), advice(max_num_seqs=1).graphs(5).message)


class TestPools:
    def test_shares(self) -> None:
        error = advice().pools(1000, 900, 150)
        assert re.search(
            naming("KV", 900, 150, 1000, "kv_cache_fraction", 0.9, "lora_device_fraction"),
            error.message,
        )
        assert re.search(
            naming(
                "kv_cache_fraction", 0.9, "lora_device_fraction", 0.05, "50B", "KV", 900, 150, 1000
            ),
            error.message,
        )
        assert error.param == "kv_cache_fraction"

    def test_bytes_that_were_said(self) -> None:
        error = advice(kv_cache_bytes=900, lora_device_bytes=150).pools(2000, 900, 150)
        assert re.search(naming("kv_cache_bytes", "lora_device_bytes"), error.message)
        assert error.param == "kv_cache_bytes"


class TestTooSmall:
    def test_what_gives_enough(self) -> None:
        per_token = bytes_per_token(RunnerSettings(), CONFIG, torch.bfloat16)
        message = advice().too_small(100 * per_token, StepMemory(70 * MIB, 30 * MIB)).message
        assert f"by {readable_bytes(100 * per_token)}:" in message
        assert re.search(
            naming("cuda_graphs", 30, "MiB", 70, "max_num_batched_tokens", "max_lora_rank"), message
        )
        assert re.search(
            naming("max_num_batched_tokens", 512 - 100, 70, "MiB", 30, "cuda_graphs"), message
        )
        assert re.search(naming("max_lora_rank", 70, "MiB", 30, "cuda_graphs"), message)

    def test_weights_that_give_enough(self) -> None:
        steps = StepMemory(70 * MIB)
        assert "int4" in advice().too_small(WHOLE - INT4 - 1, steps).message
        assert "int8" not in advice().too_small(WHOLE - INT4 - 1, steps).message
        assert re.search(
            naming(70, "max_num_batched_tokens", "max_lora_rank"),
            advice().too_small(WHOLE - INT4, steps).message,
        )

    def test_what_is_not_there_is_not_named(self) -> None:
        message = advice(max_lora_rank=1).too_small(1 << 40, StepMemory(70 * MIB)).message
        assert "cuda_graphs off" not in message
        assert "max_lora_rank" not in message
        assert re.search(naming(70, "MiB", 1), message)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        torch.OutOfMemoryError("in other words"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"),
        StepFailedError("step 0 failed: CUDA out of memory."),
    ],
)
def test_a_full_memory_is_a_config_error(error: Exception) -> None:
    assert is_out_of_memory(error)
    with (
        pytest.raises(ConfigError, match="lower it") as caught,
        out_of_memory_is(lambda: ConfigError("lower it")),
    ):
        raise error
    assert caught.value.__cause__ is error


def test_other_errors_are_left_alone() -> None:
    with (
        pytest.raises(RuntimeError, match="illegal memory access"),
        out_of_memory_is(lambda: ConfigError("lower it")),
    ):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
