"""A model's weights, packed: mapped from the cache, or packed now and kept there."""

import hashlib
import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from loraplex.adapters.seen_files import SeenFiles, identities_of
from loraplex.core.errors import ConfigError
from loraplex.core.version import __version__
from loraplex.execution.packed_cache import PackedCache
from loraplex.execution.packed_file import PackedFile
from loraplex.execution.packing import PackedWeights, WeightFormat, join_entries, pack_checkpoint
from loraplex.execution.weights import weight_files
from loraplex.kernels.ops import Kernels
from loraplex.models.config import DecoderConfig
from loraplex.models.parameters import checkpoint_shapes

logger = logging.getLogger(__name__)

_VERSION = 1
"""Of what is kept for a checkpoint. Raised when the same one is to be packed differently."""
_SEEN_AS = "checkpoint"
_HASHING_THREADS = 4
_MIB = 1 << 20


def load_weights(
    folder: Path,
    config: DecoderConfig,
    kernels: Kernels,
    form: WeightFormat,
    cache: PackedCache | None,
) -> PackedWeights:
    """The weights in `folder`, packed. Raises ConfigError.

    With a cache they are mapped from its file, at the first start as well: the same pages serve
    every process. The cache is for a CPU; a device has its own memory.
    """
    started = time.monotonic()
    if cache is None or form.device.type != "cpu":
        weights, origin = pack_checkpoint(folder, config, kernels, form), str(folder)
    else:
        weights, origin = _through_cache(folder, config, kernels, form, cache)
    seconds = time.monotonic() - started
    logger.info("weights: %d MiB from %s (%.2f s)", weights.num_bytes // _MIB, origin, seconds)
    if weights.summary:
        logger.info("%s", weights.summary)
    return weights


def _through_cache(
    folder: Path, config: DecoderConfig, kernels: Kernels, form: WeightFormat, cache: PackedCache
) -> tuple[PackedWeights, str]:
    """The weights, and where they come from."""
    files = weight_files(folder)
    identities = identities_of(files)
    key = _key(checkpoint_digest(files, cache.seen), config, kernels, form)
    with cache.turn(key):
        packed = cache.open(key)
        if packed is not None:
            return _mapped(packed, config, kernels), str(packed.path)
        weights = pack_checkpoint(folder, config, kernels, form)
        if identities_of(files) != identities:
            logger.warning("%s was changed while it was read: it is not cached", folder)
            return weights, str(folder)
        packed = cache.store(key, weights.entries, weights.summary)
    return (weights if packed is None else _mapped(packed, config, kernels)), str(folder)


def _mapped(packed: PackedFile, config: DecoderConfig, kernels: Kernels) -> PackedWeights:
    return join_entries(packed.entries(), config, kernels, packed.summary)


def checkpoint_digest(files: Sequence[Path], seen: SeenFiles) -> str:
    """SHA-256 of the files' contents, whatever their names; remembered by their identities.

    Raises ConfigError if one cannot be read.
    """
    identities = identities_of(files)
    known = seen.digest(identities, _SEEN_AS)
    if known is not None:
        return known
    with ThreadPoolExecutor(_HASHING_THREADS) as pool:
        digests = sorted(pool.map(_file_digest, files))
    digest = hashlib.sha256("".join(digests).encode()).hexdigest()
    if identities_of(files) == identities:
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


def _key(digest: str, config: DecoderConfig, kernels: Kernels, form: WeightFormat) -> str:
    """Of the cache: equal only if the packed weights are."""
    # The shapes tell how the checkpoint's tensors are to be read, which config.json decides.
    shapes = list(checkpoint_shapes(config).items())
    packing = (str(form.dtype), form.precision.value, kernels.packed_layout, __version__)
    material = msgspec.json.encode((_VERSION, digest, shapes, *packing))
    return hashlib.sha256(material).hexdigest()
