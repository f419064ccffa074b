"""Reader of adapter_model.bin, a torch file, which runs nothing that is pickled in it.

No other module of this package needs torch. Only the staging worker imports it, and only when a
folder has no safetensors file.
"""

import io
import math
import zipfile
from pathlib import Path

from loraplex.adapters.tensor_file import RawTensor, StagingLimits, read_bounded
from loraplex.core.byte_sizes import readable_bytes
from loraplex.core.errors import AdapterTooLargeError, InvalidAdapterError


def read_torch_file(path: Path, limits: StagingLimits) -> dict[str, RawTensor]:
    """Read the tensors of a state dict that torch.save wrote.

    Raises InvalidAdapterError if it contains any other object, or is broken;
    AdapterTooLargeError if it exceeds a limit.
    """
    import torch  # noqa: PLC0415 - heavy, and most adapters never need it

    content = io.BytesIO(read_bounded(path, limits.max_file_bytes))
    _check_archive(path, content, limits.max_file_bytes)
    content.seek(0)
    types = {
        torch.float64: "F64",
        torch.float32: "F32",
        torch.float16: "F16",
        torch.bfloat16: "BF16",
    }
    try:
        state = torch.load(content, map_location="cpu", weights_only=True)
    except Exception as error:
        raise InvalidAdapterError(
            f"{path} is not a plain torch state dict, and pickled objects are never loaded: "
            "save the adapter as safetensors"
        ) from error
    if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
        raise InvalidAdapterError(f"{path} does not hold a state dict but a {type(state).__name__}")
    if len(state) > limits.max_tensors:
        raise AdapterTooLargeError(
            f"{path} holds {len(state)} tensors; at most {limits.max_tensors} are read"
        )
    tensors: dict[str, RawTensor] = {}
    total = 0
    for name, tensor in state.items():
        if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
            raise InvalidAdapterError(f"{path}: {name!r} is not a dense tensor")
        # A view may repeat its few bytes over any shape.
        total += math.prod(tensor.shape) * tensor.element_size()
        if total > limits.max_file_bytes:
            raise _too_large(path, limits.max_file_bytes)
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        dtype = types.get(tensor.dtype, str(tensor.dtype).removeprefix("torch."))
        tensors[name] = RawTensor(dtype, tuple(tensor.shape), flat.numpy().tobytes())
    return tensors


def _check_archive(path: Path, content: io.BytesIO, max_bytes: int) -> None:
    """Refuse a zip archive whose members grow when unpacked, which torch's never do."""
    if not zipfile.is_zipfile(content):
        return
    try:
        with zipfile.ZipFile(content) as archive:
            members = archive.infolist()
    except (zipfile.BadZipFile, OSError, ValueError) as error:
        raise InvalidAdapterError(f"{path} is a broken archive: {error}") from error
    if any(member.compress_type != zipfile.ZIP_STORED for member in members):
        raise InvalidAdapterError(f"{path} is a compressed archive; torch.save writes none")
    if sum(member.file_size for member in members) > max_bytes:
        raise _too_large(path, max_bytes)


def _too_large(path: Path, max_bytes: int) -> AdapterTooLargeError:
    return AdapterTooLargeError(
        f"{path} unpacks to more than {readable_bytes(max_bytes)} (max_adapter_bytes)"
    )
