"""What staging is asked and what it answers: plain data that crosses a process."""

import msgspec

from loraplex.adapters.base_check import BaseCheck
from loraplex.adapters.shapes import BaseShapes
from loraplex.adapters.sources.policy import SourcePolicy
from loraplex.core.adapter import AdapterSource
from loraplex.core.errors import ErrorInfo

REQUEST_TENSORS = "a request's lora_weights"
"""The path of what came in a request: there is no source but its canonical adapter file."""


class StagingLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What is refused before it is read."""

    max_rank: int = 64
    max_file_bytes: int = 4 << 30
    max_header_bytes: int = 16 << 20
    """Of a safetensors file; also the most for adapter_config.json."""
    max_tensors: int = 100_000


class TensorHeader(msgspec.Struct, frozen=True):
    """A tensor whose bytes travel apart."""

    dtype: str
    """By Triton's name (FP16, BF16, FP32, INT32), NumPy's or safetensors'."""
    shape: tuple[int, ...]
    num_bytes: int


class StageRequest(msgspec.Struct, frozen=True, kw_only=True):
    request_id: int
    path: str
    """Any source (sources/reference.py). With tensors: only what messages call them."""
    tensors: tuple[TensorHeader, TensorHeader] | None = None
    """lora_weights and lora_config of a request, in place of a path: their bytes follow."""
    state_dir: str
    shapes: BaseShapes
    limits: StagingLimits = StagingLimits()
    policy: SourcePolicy = SourcePolicy()
    """What the source may be."""
    base_model: str = ""
    """What clients call the base, to tell when an adapter names another; empty: unknown."""
    base_path: str = ""
    """The base's folder: a copy of its own weights that an adapter brings is left out."""
    base_check: BaseCheck = BaseCheck.WARN
    """What an adapter that names another base leads to."""
    pool_dtype: str = ""
    """float32, float16 or bfloat16: what the engine computes in; empty: unknown."""
    reads_again: bool = False
    """Though the files look as they did when they were staged before."""


class StagedAdapter(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter in canonical form, checked against its base."""

    source: AdapterSource
    dtypes: tuple[str, ...]
    """Of its tensors, as the file has them, sorted: BF16, F16, F32, F64."""
    num_tensors: int
    changes_nothing: bool = False
    """Every B is zero: the adapter was never trained."""
    warnings: tuple[str, ...] = ()
    was_known: bool = False
    """The file had been staged before and has not changed since."""
    seconds: dict[str, float] = {}
    """How long each stage took."""


class StageReply(msgspec.Struct, frozen=True, kw_only=True):
    """Exactly one of `staged` and `error` is set."""

    request_id: int
    staged: StagedAdapter | None = None
    error: ErrorInfo | None = None
