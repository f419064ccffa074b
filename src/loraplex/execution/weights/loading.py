"""A model's weights, packed: mapped from the cache, or packed now and kept there."""

import logging
import time
from pathlib import Path

from loraplex.adapters.seen_files import identities_of
from loraplex.execution.weights.built import open_built
from loraplex.execution.weights.keys import checkpoint_digest, packed_key
from loraplex.execution.weights.packed_cache import PackedCache
from loraplex.execution.weights.packed_file import PackedFile
from loraplex.execution.weights.packing import (
    PackedWeights,
    WeightFormat,
    join_entries,
    pack_checkpoint,
)
from loraplex.execution.weights.weight_files import weight_files
from loraplex.kernels.ops import Kernels
from loraplex.models.spec import ModelSpec

logger = logging.getLogger(__name__)

_MIB = 1 << 20


def load_weights(
    folder: Path,
    spec: ModelSpec,
    kernels: Kernels,
    form: WeightFormat,
    cache: PackedCache | None,
) -> PackedWeights:
    """The weights in `folder`, packed. Raises ConfigError.

    Those of an engine folder are mapped from it, if it was built for this kind of machine. With a
    cache they are mapped from its file, at the first start as well: the same pages serve every
    process. Both are for a CPU; a device has its own memory.
    """
    started = time.monotonic()
    is_cpu = form.device.type == "cpu"
    built = open_built(folder, spec, kernels, form, cache) if is_cpu else None
    if built is not None:
        weights, origin = _mapped(built, spec, kernels), str(built.path)
    elif cache is None or not is_cpu:
        weights, origin = pack_checkpoint(folder, spec, kernels, form), str(folder)
    else:
        weights, origin = _through_cache(folder, spec, kernels, form, cache)
    seconds = time.monotonic() - started
    logger.info("weights: %d MiB from %s (%.2f s)", weights.num_bytes // _MIB, origin, seconds)
    if weights.summary:
        logger.info("%s", weights.summary)
    return weights


def _through_cache(
    folder: Path, spec: ModelSpec, kernels: Kernels, form: WeightFormat, cache: PackedCache
) -> tuple[PackedWeights, str]:
    """The weights, and where they come from."""
    files = weight_files(folder)
    identities = identities_of(files)
    key = packed_key(checkpoint_digest(files, cache.seen), spec, kernels, form)
    with cache.turn(key, str(folder)):
        packed = cache.open(key)
        if packed is not None:
            return _mapped(packed, spec, kernels), str(packed.path)
        weights = pack_checkpoint(folder, spec, kernels, form)
        if identities_of(files) != identities:
            logger.warning("%s was changed while it was read: it is not cached", folder)
            return weights, str(folder)
        packed = cache.store(key, weights.entries, weights.summary)
    return (weights if packed is None else _mapped(packed, spec, kernels)), str(folder)


def _mapped(packed: PackedFile, spec: ModelSpec, kernels: Kernels) -> PackedWeights:
    return join_entries(packed.entries(), spec, kernels, packed.summary)
