"""lora_weights and lora_config of a request, through the staging worker."""

import asyncio
import io
import sys

import numpy as np
import pytest

from loraplex.adapters.canonical import read_canonical
from loraplex.adapters.sources.policy import SourcePolicy
from loraplex.adapters.staged import StageRequest
from loraplex.adapters.staging import RequestTensor, StagingWorker
from loraplex.adapters.staging_worker import serve, stage
from loraplex.adapters.state_files import canonical_path
from loraplex.adapters.tensor_file import TensorHeader
from loraplex.core.errors import (
    AdapterLoadError,
    AdapterMismatchError,
    AdapterTooLargeError,
    InvalidAdapterError,
)
from loraplex.core.rank_limits import RankLimits
from support.kept_staging import keeping_staging_processes
from support.naming import naming


@pytest.fixture(autouse=True)
def _shared_staging():
    with keeping_staging_processes():
        yield


TYPE_NAMES = {"<f4": ("FP32", "float32", "F32", "TYPE_FP32"), "<f2": ("FP16", "float16", "F16")}


def request_tensors(pair, weights=None, config=None):
    weights = pair.weights()[None] if weights is None else weights
    config = pair.CONFIG if config is None else config
    return (
        RequestTensor("FP32", weights.shape, weights.tobytes()),
        RequestTensor("INT32", config.shape, config.tobytes()),
    )


class TestTensorsOfARequest:
    @pytest.fixture
    async def worker(self, tmp_path):
        made = StagingWorker(tmp_path / "state")
        yield made
        await made.close()

    async def test_they_are_the_adapter_that_a_folder_would_be(
        self, worker, staged, tmp_path, shapes, pair
    ):
        got = await worker.stage_tensors(
            *request_tensors(pair), shapes=shapes, max_ranks=RankLimits(8)
        )
        assert read_canonical(canonical_path(tmp_path / "state", got.source.digest)).rows
        folder = await worker.stage(
            str(pair.write(tmp_path / "pair")), shapes=shapes, max_ranks=RankLimits(8)
        )
        assert got.source == folder.source
        assert not got.was_known
        assert list(got.seconds) == ["look_up", "read", "check", "hash", "write"]
        other = await worker.stage_tensors(
            *request_tensors(pair, pair.weights(seed=1)), shapes=shapes, max_ranks=RankLimits(8)
        )
        assert other.source.digest != got.source.digest

    async def test_errors_come_back_and_the_worker_lives(self, worker, shapes, pair):
        bad = request_tensors(pair, config=pair.CONFIG + np.array([0, 9, 0], "<i4"))
        # TensorRT-LLM's text.
        with pytest.raises(AdapterMismatchError, match=r"^Expected layerId to be in the range"):
            await worker.stage_tensors(*bad, shapes=shapes, max_ranks=RankLimits(8))
        (process,) = worker._local.processes
        pid = process.process.pid
        short = RequestTensor("FP32", (1, 3, 72), b"123")
        with pytest.raises(InvalidAdapterError, match=naming(864, 3)):
            await worker.stage_tensors(short, bad[1], shapes=shapes, max_ranks=RankLimits(8))
        unknown = RequestTensor("BYTES", (1, 3, 72), b"123")
        # TensorRT-LLM's text.
        with pytest.raises(InvalidAdapterError, match=r"same data type as base model.*BYTES"):
            await worker.stage_tensors(unknown, bad[1], shapes=shapes, max_ranks=RankLimits(8))
        # TensorRT-LLM's text.
        with pytest.raises(InvalidAdapterError, match="TYPE_INT32 but was INT64"):
            await worker.stage_tensors(
                request_tensors(pair)[0],
                RequestTensor("INT64", (3, 3), bytes(72)),
                shapes=shapes,
                max_ranks=RankLimits(8),
            )
        assert await worker.stage_tensors(
            *request_tensors(pair), shapes=shapes, max_ranks=RankLimits(8)
        )
        assert [one.process.pid for one in worker._local.processes] == [pid]

    async def test_many_megabytes_and_company(self, worker, peft_folder, shapes, pair):
        """More than any pipe holds; a folder's turn comes between."""
        wide = np.zeros((1, 3, 1_500_000), "<f4")
        wide[0, :, : max(pair.SIZES)] = pair.weights()
        large = request_tensors(pair, wide)
        folder = str(peft_folder().write())
        got = await asyncio.gather(
            worker.stage_tensors(*large, shapes=shapes, max_ranks=RankLimits(8)),
            worker.stage(folder, shapes=shapes, max_ranks=RankLimits(8)),
            worker.stage_tensors(*request_tensors(pair), shapes=shapes, max_ranks=RankLimits(8)),
        )
        assert got[0].source.digest == got[2].source.digest != got[1].source.digest

    async def test_views_of_other_elements_are_taken_by_their_bytes(self, worker, shapes, pair):
        weights = pair.weights()
        tensors = request_tensors(pair)
        got = await worker.stage_tensors(
            RequestTensor("float32", weights.shape, weights.data.cast("B").cast("f")),
            tensors[1],
            shapes=shapes,
            max_ranks=RankLimits(8),
        )
        plain = await worker.stage_tensors(*tensors, shapes=shapes, max_ranks=RankLimits(8))
        assert got.source == plain.source

    async def test_a_worker_that_dies_over_them(self, tmp_path, shapes, pair):
        worker = StagingWorker(tmp_path, command=(sys.executable, "-c", "raise SystemExit(3)"))
        wide = request_tensors(pair, np.zeros((1, 3, 1_000_000), "<f4"))
        with pytest.raises(AdapterLoadError, match=naming(3, "lora_weights")):
            await worker.stage_tensors(*wide, shapes=shapes, max_ranks=RankLimits(8))
        await worker.close()

    async def test_too_many_bytes_are_not_sent(self, tmp_path, shapes, pair):
        worker = StagingWorker(tmp_path / "state", policy=SourcePolicy(max_bytes=100))
        with pytest.raises(AdapterTooLargeError, match=naming("864 B", "100 B")):
            await worker.stage_tensors(
                *request_tensors(pair), shapes=shapes, max_ranks=RankLimits(8)
            )
        assert worker._local.processes == []

    @pytest.mark.parametrize(
        ("kind", "name"), [(kind, name) for kind, names in TYPE_NAMES.items() for name in names]
    )
    def test_names_of_types(self, tmp_path, shapes, kind, name, pair):
        weights = pair.weights().astype(kind)
        headers = (
            TensorHeader(name, weights.shape, weights.nbytes),
            TensorHeader("int32", pair.CONFIG.shape, pair.CONFIG.nbytes),
        )
        request = StageRequest(
            request_id=1, path="", state_dir=str(tmp_path), shapes=shapes, tensors=headers
        )
        got = stage(request, [weights.tobytes(), pair.CONFIG.tobytes()])
        assert got.dtypes == ({"<f4": "F32", "<f2": "F16"}[kind],)

    def test_a_stream_that_ends_within_the_tensors_ends_the_worker(self, shapes, tmp_path):
        import msgspec

        headers = (TensorHeader("FP32", (1, 1), 4), TensorHeader("INT32", (1, 3), 12))
        request = StageRequest(
            request_id=1, path="", state_dir=str(tmp_path), shapes=shapes, tensors=headers
        )
        body = msgspec.msgpack.encode(request)
        replies = io.BytesIO()
        serve(io.BytesIO(len(body).to_bytes(8, "little") + body + bytes(15)), replies)
        assert replies.getvalue() == b""
        serve(io.BytesIO(len(body).to_bytes(8, "little") + body + bytes(16)), replies)
        assert b"adapterSize" in replies.getvalue()
