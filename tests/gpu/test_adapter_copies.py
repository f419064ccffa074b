"""Adapters on a GPU: they come and go while it decodes, and how fast they come."""

from pathlib import Path

import pytest
import torch

from loraplex.core.plan import BlockCopy, BlockTransfer
from loraplex.execution.adapters.pinned_pages import PinnedPages
from loraplex.execution.adapters.transfers import PageCopies
from loraplex.execution.sizing.settings import RunnerSettings
from loraplex.kernels.accelerator import CudaAccelerator
from loraplex.kernels.ops import AttentionShape
from loraplex.kernels.reference import ReferenceKernels
from loraplex.memory.adapter_pages import Placement
from support.adapter_churn import AdapterChurn
from support.kv_caches import by_layer, kv_cache
from support.tiny_model import TinyCheckpoint

pytestmark = pytest.mark.gpu

NUM_STEPS = 10_000


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
def test_no_token_is_another_while_adapters_come_and_go(tmp_path: Path, overlap: bool) -> None:
    settings = RunnerSettings(
        device="cuda",
        dtype="float32",
        batch_invariant=True,
        num_blocks=400,
        max_num_seqs=16,
        max_lora_rank=16,
        lora_device_bytes=12 << 20,
    )
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4}
    folder = TinyCheckpoint(tmp_path, vocab_size=1000, **sizes).save()
    churn = AdapterChurn(folder, settings, 60, overlap=overlap)
    report = churn.run(NUM_STEPS // 2, num_running=12)
    churn.close()
    assert report.wrong == []
    assert report.device_evictions > 100
    assert report.host_evictions > 10


def test_pages_arrive_whole_and_how_fast(capsys: pytest.CaptureFixture[str]) -> None:
    """256 pages of 8 MiB, 8 to an adapter, copied twice over."""
    accelerator = CudaAccelerator(torch.device("cuda"))
    page_elements, num_pages, per_adapter = 1 << 22, 256, 8
    pages = PinnedPages(accelerator, page_elements, torch.bfloat16)
    leases = [pages.take(per_adapter) for _ in range(num_pages // per_adapter)]
    for index, lease in enumerate(leases):
        for page in lease.pages:
            page.fill_(index + 1)
    with accelerator.compute():
        pool = torch.zeros(num_pages, page_elements, dtype=torch.bfloat16, device="cuda")
    accelerator.synchronize()
    copies = PageCopies(accelerator, pool)
    begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    for shift in range(2):
        with accelerator.copies():
            begin.record()
        for index, lease in enumerate(leases):
            first = (index + shift) % len(leases) * per_adapter
            page_ids = list(range(first, first + per_adapter))
            copies.start(index, lease, Placement((), per_adapter), page_ids)
        with accelerator.copies():
            end.record()
        accelerator.synchronize()
        for index in range(len(leases)):
            first = (index + shift) % len(leases) * per_adapter
            assert (pool[first : first + per_adapter] == index + 1).all()
    rate = pool.nbytes / begin.elapsed_time(end) / 1e6
    with capsys.disabled():
        print(f"\nhost to device: {rate:.1f} GB/s, {pages.num_bytes >> 20} MiB pinned")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_blocks_move_between_device_and_host(dtype: torch.dtype) -> None:
    accelerator = CudaAccelerator(torch.device("cuda"))
    shape = AttentionShape(num_heads=32, num_kv_heads=8, head_dim=128, block_size=16)
    kernels = ReferenceKernels(torch.device("cuda"))
    cache = kv_cache([(200, 100)], [shape] * 8, dtype, kernels, accelerator)
    with accelerator.compute():
        for number, storage in enumerate(by_layer(cache.storages)):
            storage.tensors[0].copy_(torch.randn_like(storage.tensors[0].float()) + number)
            storage.tensors[1].copy_(torch.randn_like(storage.tensors[1].float()) - number)
        before = [(s.tensors[0].clone(), s.tensors[1].clone()) for s in by_layer(cache.storages)]
        cache.offload_blocks([BlockTransfer(0, block, 99 - block) for block in range(100)])
        for storage in by_layer(cache.storages):
            storage.tensors[0][:100].zero_()
            storage.tensors[1][:100].zero_()
        cache.load_blocks([BlockTransfer(0, block + 50, 99 - block) for block in range(50)])
        cache.copy_blocks([BlockCopy(0, 50, 51), BlockCopy(0, 51, 50), BlockCopy(0, 150, 0)])
    accelerator.synchronize()
    for storage, tensors in zip(by_layer(cache.storages), before, strict=True):
        for tensor, was in zip(storage.tensors, tensors, strict=True):
            assert torch.equal(tensor[[50, 51, 0]], was[[1, 0, 150]])
            assert torch.equal(tensor[52:100], was[2:50])
            assert torch.equal(tensor[100:], was[100:])
            assert not tensor[1:50].any()
