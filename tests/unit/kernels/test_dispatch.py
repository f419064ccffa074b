"""Which backend serves a device."""

import logging
import sys
from collections.abc import Iterator

import pytest
import torch

from loraplex.kernels import dispatch
from loraplex.kernels.accelerator import Accelerator, HostAccelerator
from loraplex.kernels.cuda.backend import CudaKernels
from loraplex.kernels.reference import ReferenceKernels
from loraplex.kernels.sizes import ProgramSizes

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def fresh_dispatch(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    dispatch._has_triton.cache_clear()
    yield monkeypatch
    dispatch._has_triton.cache_clear()


class FakeGpu(HostAccelerator):
    def __init__(self, device: torch.device) -> None:
        self.requested = device


def test_a_cpu_has_no_accelerator() -> None:
    assert dispatch.select_accelerator(CPU) is None
    assert dispatch.select_accelerator(torch.device("meta")) is None


def test_a_gpu_with_triton(fresh_dispatch: pytest.MonkeyPatch) -> None:
    fresh_dispatch.setattr(dispatch, "CudaAccelerator", FakeGpu)
    accelerator = dispatch.select_accelerator(CUDA)
    assert isinstance(accelerator, FakeGpu)
    assert accelerator.requested == CUDA
    assert isinstance(dispatch.select_kernels(CPU, accelerator), CudaKernels)


def test_a_gpu_without_triton_computes_with_torch_and_says_so_once(
    fresh_dispatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fresh_dispatch.setitem(sys.modules, "triton", None)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert dispatch.select_accelerator(CUDA) is None
    (record,) = caplog.records
    assert "no Triton" in record.getMessage()
    assert isinstance(dispatch.select_kernels(CUDA, None), ReferenceKernels)


def test_the_kernels_of_an_accelerator_get_the_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    passed: dict[str, object] = {}

    class Kernels:
        def __init__(self, accelerator: Accelerator, **settings: object) -> None:
            passed.update(settings, accelerator=accelerator)

    monkeypatch.setattr("loraplex.kernels.cuda.backend.CudaKernels", Kernels)
    accelerator = HostAccelerator()
    kernels = dispatch.select_kernels(
        CPU,
        accelerator,
        batch_invariant=True,
        attention_backend="triton",
        sizes={"lora_splits": "16"},
    )
    assert isinstance(kernels, Kernels)
    assert passed == {
        "accelerator": accelerator,
        "batch_invariant": True,
        "attention_backend": "triton",
        "channel": None,
        "sizes": ProgramSizes(lora_splits=16),
    }
