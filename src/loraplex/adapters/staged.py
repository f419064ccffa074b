"""Requests to and replies of the staging worker: plain data that crosses a process."""

import msgspec

from loraplex.adapters.base_check import BaseCheck
from loraplex.adapters.shapes import BaseShapes
from loraplex.adapters.sources.policy import SourcePolicy
from loraplex.adapters.staging_limits import StagingLimits
from loraplex.adapters.tensor_file import TensorHeader
from loraplex.core.adapter import AdapterSource
from loraplex.core.errors import ErrorInfo

REQUEST_TENSORS = "a request's lora_weights"
"""Path of an adapter from a request, whose only source is its canonical adapter file."""


class StageRequest(msgspec.Struct, frozen=True, kw_only=True):
    request_id: int
    path: str
    """Source (sources/reference.py); with tensors or an upload only their name in messages."""
    upload: str = ""
    """Folder or file that the server received, which replaces a path."""
    tensors: tuple[TensorHeader, TensorHeader] | None = None
    """lora_weights and lora_config of a request, which replace a path: their bytes follow."""
    state_dir: str
    shapes: BaseShapes
    limits: StagingLimits = StagingLimits()
    policy: SourcePolicy = SourcePolicy()
    """Rules for the source."""
    base_model: str = ""
    """Name of the base, to detect an adapter of another base; empty if unknown."""
    base_path: str = ""
    """Folder of the base: copies of its own weights in an adapter are left out."""
    base_check: BaseCheck = BaseCheck.WARN
    """Consequence of an adapter that names another base."""
    pool_dtype: str = ""
    """Type in which the engine computes: float32, float16 or bfloat16; empty if unknown."""
    reads_again: bool = False
    """Read the files even if they look unchanged since they were staged before."""


class StagedAdapter(msgspec.Struct, frozen=True, kw_only=True):
    """Report of an adapter in canonical form, checked against its base."""

    source: AdapterSource
    dtypes: tuple[str, ...]
    """Types of its tensors in the file, sorted: BF16, F16, F32, F64."""
    num_tensors: int
    changes_nothing: bool = False
    """Whether every B is zero: the adapter was never trained."""
    warnings: tuple[str, ...] = ()
    was_known: bool = False
    """Whether the file had been staged before and has not changed since."""
    seconds: dict[str, float] = {}
    """Duration of each stage."""


class StageReply(msgspec.Struct, frozen=True, kw_only=True):
    """Reply to a StageRequest: exactly one of `staged` and `error` is set."""

    request_id: int
    staged: StagedAdapter | None = None
    error: ErrorInfo | None = None
