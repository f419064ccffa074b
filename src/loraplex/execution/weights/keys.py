"""What packed weights are found by: the checkpoint's content, and what decides how it is packed."""

import hashlib
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from loraplex.adapters.seen_files import SeenFiles, identities_of
from loraplex.core.errors import ConfigError
from loraplex.core.version import __version__
from loraplex.execution.weights.packing import WeightFormat
from loraplex.kernels.ops import Kernels
from loraplex.models.parameters import checkpoint_shapes, linear_places
from loraplex.models.spec import ModelSpec

logger = logging.getLogger(__name__)

_VERSION = 1
"""Version of the cached weights, raised when the same checkpoint is to be packed differently."""
_SEEN_AS = "checkpoint"
_HASHING_THREADS = 4


def checkpoint_digest(files: Sequence[Path], seen: SeenFiles | None = None) -> str:
    """SHA-256 of the files' contents, whatever their names; remembered by their identities.

    Raises ConfigError if one cannot be read.
    """
    identities = identities_of(files)
    known = None if seen is None else seen.digest(identities, _SEEN_AS)
    if known is not None:
        return known
    with ThreadPoolExecutor(_HASHING_THREADS) as pool:
        digests = sorted(pool.map(_file_digest, files))
    digest = hashlib.sha256("".join(digests).encode()).hexdigest()
    if seen is not None and identities_of(files) == identities:
        try:
            seen.remember(identities, digest, _SEEN_AS)
        except OSError as error:
            logger.debug("cannot remember the checkpoint's digest: %s", error.strerror)
    return digest


def _file_digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error


def packed_key(digest: str, spec: ModelSpec, kernels: Kernels, form: WeightFormat) -> str:
    """Return a key that is equal only if the packed weights are. digest: of the checkpoint."""
    # config.json decides how tensors are read, and the shapes show the decision.
    shapes = list(checkpoint_shapes(spec).items())
    parts = [(p.name, p.own_outputs, p.own_inputs, p.num_blocks) for p in linear_places(spec)]
    packing = (str(form.dtype), form.precision.value, kernels.packed_layout, __version__)
    stored = () if spec.stored_format is None else (spec.stored_format.values,)
    material = msgspec.json.encode((_VERSION, digest, shapes, parts, *packing, *stored))
    return hashlib.sha256(material).hexdigest()
