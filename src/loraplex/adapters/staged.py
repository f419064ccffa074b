"""Requests to and replies of the staging worker: plain data that crosses a process."""

from pathlib import Path

import msgspec

from loraplex.adapters.base_check import BaseCheck
from loraplex.adapters.formats.peft_ends import EndTokens
from loraplex.adapters.shapes import BaseShapes
from loraplex.adapters.sources.policy import SourcePolicy
from loraplex.adapters.tensor_file import StagingLimits, TensorHeader
from loraplex.core.adapter import AdapterSource
from loraplex.core.errors import ErrorInfo
from loraplex.core.vector_format import TextPrompts

UPLOAD = "the upload"
"""What messages call the files that a client sent; each is called by its name."""
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
    base_check: BaseCheck = BaseCheck.AUTO
    """Consequence of an adapter that names another base."""
    pool_dtype: str = ""
    """Type in which the engine computes: float32, float16 or bfloat16; empty if unknown."""
    examines: bool = False
    """Account for every tensor instead of staging: the reply has `examined`."""
    reads_again: bool = False
    """Read the files even if they look unchanged since they were staged before."""

    @property
    def base_folder(self) -> Path | None:
        return Path(self.base_path) if self.base_path else None


class StagedAdapter(msgspec.Struct, frozen=True, kw_only=True):
    """Report of an adapter in canonical form, checked against its base."""

    source: AdapterSource
    dtypes: tuple[str, ...]
    """Types of its tensors in the file, sorted: BF16, F16, F32, F64."""
    num_tensors: int
    changes_nothing: bool = False
    """Whether every B is zero: the adapter was never trained."""
    end_tokens: EndTokens = EndTokens()
    """End tokens that its files name."""
    prompts: TextPrompts | None = None
    """Prompts of its folder for texts whose vectors it makes; None: there are none."""
    trained_on: str | None = None
    """Name of the base model that its files have."""
    warnings: tuple[str, ...] = ()
    """Warnings and notes (base_check.divided)."""
    was_known: bool = False
    """Whether the file had been staged before and has not changed since."""
    seconds: dict[str, float] = {}
    """Duration of each stage."""


class ExaminedTensor(msgspec.Struct, frozen=True, kw_only=True):
    """Tensor of an adapter, and its fate."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    module: str | None
    """Module of the base; null if the name means none."""
    layer: int | None
    """Decoder layer; null outside of them."""
    expert: int | None
    rank: int | None
    """Rank, of a factor of LoRA."""
    applied: bool = True
    refused: bool = False
    """Whether the adapter cannot be loaded because of it."""
    reason: str | None = None
    """Why it is not applied."""


class Examination(msgspec.Struct, frozen=True, kw_only=True):
    """Account of all tensors of an adapter."""

    format: str = ""
    """Name of its format; empty if it has none that is known."""
    trained_on: str | None = None
    """Name of the base model that its files have."""
    tensors: tuple[ExaminedTensor, ...] = ()
    """First 10000 tensors; the refused ones come first."""
    num_tensors: int = 0
    num_refused: int = 0


class StageReply(msgspec.Struct, frozen=True, kw_only=True):
    """Reply to a StageRequest: exactly one of `staged`, `examined` and `error` is set."""

    request_id: int
    staged: StagedAdapter | None = None
    examined: Examination | None = None
    error: ErrorInfo | None = None
    is_last: bool = False
    """The process ends after it."""
