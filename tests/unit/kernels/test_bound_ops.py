"""A backend that forgets to bind an op would compute it with torch, without a word."""

import pytest
import torch

from loraplex.kernels.accelerator import HostAccelerator
from loraplex.kernels.native.backend import NativeKernels
from loraplex.kernels.native.library import NativeLibraryError, load_library
from loraplex.kernels.ops import AttentionRules, Kernels
from loraplex.kernels.reference import ReferenceKernels
from loraplex.kernels.reference_attention import TilePlan

OPS = sorted(name for name in vars(Kernels) if not name.startswith("_"))


def ops_of_the_reference(kernels: ReferenceKernels) -> list[str]:
    """Return the members of Kernels that the backend has from the reference."""
    own = vars(kernels)
    return [
        name
        for name in OPS
        if name not in own and getattr(type(kernels), name) is getattr(ReferenceKernels, name)
    ]


def test_a_cpu_computes_each_op_natively() -> None:
    try:
        library = load_library()
    except NativeLibraryError as error:
        pytest.skip(f"the native kernels are not built: {error}")
    # No op has a choice of sizes.
    assert ops_of_the_reference(NativeKernels(library, 1)) == ["recording", "size_of"]


def test_a_gpu_computes_each_op_by_its_own_programs() -> None:
    backend = pytest.importorskip("loraplex.kernels.cuda.backend", reason="no Triton")
    kernels = backend.CudaKernels(HostAccelerator())
    # Blocks of files are decoded by torch, and then moved to the device. Latent attention has no
    # programs yet.
    assert ops_of_the_reference(kernels) == [
        *("add_heads_lora", "gather_columns", "latent_attention", "lora_ns", "pack_blocks"),
        *("scale_heads", "write_latent", "xielu"),
    ]


def test_a_gpu_records_no_step_with_latent_attention() -> None:
    backend = pytest.importorskip("loraplex.kernels.cuda.backend", reason="no Triton")
    kernels = backend.CudaKernels(HostAccelerator())
    plan = TilePlan((), AttentionRules(scale=1.0))
    results = iter([torch.zeros(1), torch.ones(1)])
    with kernels.recording():
        first, second = (kernels.repeat("a step", (plan,), lambda: next(results)) for _ in range(2))
    assert (first.item(), second.item()) == (0, 1)
    assert "a step" not in kernels.graphs
