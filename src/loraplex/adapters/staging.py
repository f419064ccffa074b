"""Client of the staging workers, the only processes that read users' files.

One pool of workers stages local sources and tensors of requests, another one remote sources: a slow
download delays no local adapter. In each pool no tenant waits for the loads of another. This side
loads neither numpy nor torch.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path

import msgspec

from loraplex.adapters.base_check import BaseCheck
from loraplex.adapters.shapes import BaseShapes
from loraplex.adapters.sources.policy import SourcePolicy
from loraplex.adapters.sources.reference import SourceKind, parse, shown_source
from loraplex.adapters.staged import (
    REQUEST_TENSORS,
    Examination,
    StagedAdapter,
    StageReply,
    StageRequest,
)
from loraplex.adapters.staging_limits import StagingLimits
from loraplex.adapters.staging_pool import StagingPool
from loraplex.adapters.tensor_file import TensorHeader
from loraplex.core.byte_sizes import readable_bytes
from loraplex.core.closing import close_together
from loraplex.core.errors import (
    AdapterTooLargeError,
    InvalidAdapterError,
    error_from_info,
)
from loraplex.core.python_process import module_command
from loraplex.core.rank_limits import RankLimits

__all__ = ["RequestTensor", "StagedAdapter", "StagingWorker"]

_WORKER_MODULE = "loraplex.adapters.staging_worker"


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class RequestTensor:
    """Tensor of a request: row-major, little-endian, in host memory."""

    dtype: str
    """Triton's name (FP16, BF16, FP32, INT32) or NumPy's (float16, bfloat16, ...)."""
    shape: tuple[int, ...]
    data: bytes | bytearray | memoryview

    @property
    def view(self) -> memoryview:
        """Return the bytes, whatever the type of the buffer's elements is."""
        return memoryview(self.data).cast("B")


OPERATOR = ""
"""Tenant of the loads that the operator's configuration needs."""


class StagingWorker:
    """Stages adapters in processes, several at a time."""

    def __init__(
        self,
        state_dir: Path,
        *,
        policy: SourcePolicy = SourcePolicy(),  # noqa: B008 - it is frozen
        timeout_seconds: float = 120.0,
        num_workers: int = 4,
        has_tenants: bool = False,
        command: tuple[str, ...] = module_command(_WORKER_MODULE),
    ) -> None:
        """Create the worker; its processes start later.

        policy: rules for sources that clients name. timeout_seconds: limit of one load, to which a
        remote source adds the time of its download. num_workers: number of local and of remote
        sources that are read at a time. has_tenants: a load of one tenant finds a started process
        while another's has just begun.
        """
        self._state_dir = state_dir
        self._policy = policy
        self._request_ids = itertools.count(1)
        num_spare = 2 if has_tenants else 1
        self._local = StagingPool(command, timeout_seconds, num_workers, num_spare)
        remote_seconds = timeout_seconds + policy.max_seconds
        self._remote = StagingPool(command, remote_seconds, num_workers, num_spare)

    async def stage(
        self,
        path: str,
        *,
        shapes: BaseShapes,
        max_ranks: RankLimits,
        base_model: str = "",
        base_path: str = "",
        base_check: BaseCheck = BaseCheck.WARN,
        pool_dtype: str = "",
        reads_again: bool = False,
        is_trusted: bool = True,
        tenant: str = OPERATOR,
        upload: Path | None = None,
    ) -> StagedAdapter:
        """Put the adapter at `path` into canonical form and check it against the base.

        StageRequest documents the arguments; `path` is any source (sources/reference.py), or with
        `upload` the name of an upload.
        is_trusted: the operator named it; otherwise the policy for clients applies. tenant: the one
        whose load it is; its loads wait for each other only.

        Raises what is wrong with it (InvalidAdapterError, AdapterMismatchError,
        AdapterTooLargeError, UnsupportedFeatureError, PermissionDeniedError), StorageFullError, or
        AdapterLoadError if its source does not respond, or the worker died or exceeded its time
        limit.
        """
        request = StageRequest(
            request_id=next(self._request_ids),
            path=str(path),
            upload="" if upload is None else str(upload),
            state_dir=str(self._state_dir),
            shapes=shapes,
            limits=self._limits(max_ranks),
            policy=self._policy.for_operator() if is_trusted else self._policy,
            base_model=base_model,
            base_path=base_path,
            base_check=base_check,
            pool_dtype=pool_dtype,
            reads_again=reads_again,
        )
        return _staged(await self._request(self._pool(path, upload), request, tenant))

    async def examine(
        self,
        path: str,
        *,
        shapes: BaseShapes,
        max_ranks: RankLimits,
        base_path: str,
        pool_dtype: str,
        tenant: str,
        upload: Path | None = None,
    ) -> Examination:
        """Account for every tensor of an adapter that a client names. Raises as `stage`, if they
        cannot be listed."""
        request = StageRequest(
            request_id=next(self._request_ids),
            path=path,
            upload="" if upload is None else str(upload),
            examines=True,
            state_dir=str(self._state_dir),
            shapes=shapes,
            limits=self._limits(max_ranks),
            policy=self._policy,
            base_path=base_path,
            pool_dtype=pool_dtype,
        )
        reply = await self._request(self._pool(path, upload), request, tenant)
        assert reply.examined is not None
        return reply.examined

    async def stage_tensors(
        self,
        lora_weights: RequestTensor,
        lora_config: RequestTensor,
        *,
        shapes: BaseShapes,
        max_ranks: RankLimits,
        pool_dtype: str = "",
        tenant: str = OPERATOR,
    ) -> StagedAdapter:
        """Stage TensorRT-LLM's tensors [1, N, W] and [1, N, 3 or 4] (or without the 1).

        The bytes go to the worker; this side only copies them.
        """
        tensors = (lora_weights, lora_config)
        weights, config = (TensorHeader(t.dtype, t.shape, t.view.nbytes) for t in tensors)
        limits = self._limits(max_ranks)
        if max(weights.num_bytes, config.num_bytes) > limits.max_file_bytes:
            raise AdapterTooLargeError(
                f"lora_weights has {readable_bytes(weights.num_bytes)}, lora_config "
                f"{readable_bytes(config.num_bytes)}; at most "
                f"{readable_bytes(limits.max_file_bytes)} are read (max_adapter_bytes)"
            )
        request = StageRequest(
            request_id=next(self._request_ids),
            path=REQUEST_TENSORS,
            tensors=(weights, config),
            state_dir=str(self._state_dir),
            shapes=shapes,
            limits=limits,
            pool_dtype=pool_dtype,
        )
        views = [tensor.view for tensor in tensors]
        return _staged(await self._request(self._local, request, tenant, views))

    def _pool(self, path: str, upload: Path | None) -> StagingPool:
        is_here = upload is not None or parse(str(path)).kind is SourceKind.LOCAL
        return self._local if is_here else self._remote

    async def _request(
        self,
        pool: StagingPool,
        request: StageRequest,
        tenant: str,
        tensors: Sequence[memoryview] = (),
    ) -> StageReply:
        try:
            body = msgspec.msgpack.encode(request)
        except UnicodeEncodeError as error:
            raise InvalidAdapterError("the adapter's path is not valid Unicode") from error
        what = shown_source(request.path)
        reply = await pool.request(tenant, request.request_id, what, [memoryview(body), *tensors])
        if reply.error is not None:
            raise error_from_info(reply.error)
        return reply

    async def start(self) -> None:
        """Start a worker of local sources, so that the first adapter does not wait for it."""
        await self._local.start()

    async def keep_spare(self) -> None:
        """Start the workers that are to be idle for tenants' loads."""
        await self._local.keep_spare()
        if self._policy.hosts:
            await self._remote.keep_spare()

    async def close(self) -> None:
        """End the workers; loads in progress fail."""
        await close_together(self._local.close(), self._remote.close())

    def _limits(self, max_ranks: RankLimits) -> StagingLimits:
        return StagingLimits(max_ranks=max_ranks, max_file_bytes=self._policy.max_bytes)


def _staged(reply: StageReply) -> StagedAdapter:
    assert reply.staged is not None
    return reply.staged
