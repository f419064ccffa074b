"""A model's weights, packed: mapped from a build or the cache, or packed now and kept there.

The packed weights of an engine folder are written once by a build, and mapped by every start after
it. They are what the weights cache would hold, under the same key: made for one kind of processor,
one type and one precision. Where another one is wanted they are passed over, and the native weights
of the same folder are packed.
"""

import contextlib
import dataclasses
import functools
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
from loraplex.execution.weights.background_store import BackgroundStore
from loraplex.execution.weights.packed_cache import PackedCache
from loraplex.execution.weights.packed_file import PackedFile, PackedFileError, write_packed
from loraplex.execution.weights.packing import (
    PackedWeights,
    WeightFormat,
    join_entries,
    pack_checkpoint,
)
from loraplex.execution.weights.weight_files import weight_files
from loraplex.kernels.ops import Kernels
from loraplex.models.engine_folder import PACKED_NAME, weights_digest
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
    known = None if seen is None else seen.find(identities, _SEEN_AS)
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


def build_weights(
    source: Path, engine: Path, spec: ModelSpec, kernels: Kernels, form: WeightFormat
) -> str:
    """Pack the weights in `source` into the engine folder; gives the digest of what was packed.

    The digest belongs into the folder's config.json. Raises ConfigError.
    """
    digest = checkpoint_digest(weight_files(source))
    weights = pack_checkpoint(source, spec, kernels, form)
    key = packed_key(digest, spec, kernels, form)
    try:
        write_packed(engine / PACKED_NAME, key, weights.entries, weights.summary)
    except OSError as error:
        raise ConfigError(f"cannot write {engine / PACKED_NAME}: {error.strerror}") from error
    if weights.summary:
        logger.info("%s", weights.summary)
    return digest


def open_built(
    folder: Path,
    spec: ModelSpec,
    kernels: Kernels,
    form: WeightFormat,
    cache: PackedCache | None,
) -> PackedFile | None:
    """The packed weights of an engine folder; None, and said, if they are not what is wanted.

    The file is read in full once, to see that it is whole: the cache remembers it.
    """
    digest = weights_digest(folder)
    if digest is None:
        return None
    path = folder / PACKED_NAME
    try:
        file = PackedFile(path, packed_key(digest, spec, kernels, form))
        if cache is None:
            file.check_payload()
        else:
            cache.check_once(file)
    except (OSError, PackedFileError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or error
        logger.warning(
            "%s is not used: %s. It was built for another processor, type, precision or version, "
            "or is damaged; the weights of the same folder are packed instead",
            *(path, reason),
        )
        return None
    return file


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
    cache they are mapped from its file. At the first start they are packed in memory, and a thread
    writes that file meanwhile: other processes that need the same weights wait for it, and share
    its pages. Both are for a CPU; a device has its own memory.
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
    with contextlib.ExitStack() as turn:
        turn.enter_context(cache.turn(key, str(folder)))
        packed = cache.open(key)
        if packed is not None:
            return _mapped(packed, spec, kernels), str(packed.path)
        weights = pack_checkpoint(folder, spec, kernels, form)
        if identities_of(files) != identities:
            logger.warning("%s was changed while it was read: it is not cached", folder)
            return weights, str(folder)
        # A process that waits for this turn maps the file once it is there.
        store = functools.partial(cache.store, key, weights.entries, weights.summary)
        storing = BackgroundStore(store, turn.pop_all())
    return dataclasses.replace(weights, storing=storing), str(folder)


def _mapped(packed: PackedFile, spec: ModelSpec, kernels: Kernels) -> PackedWeights:
    return join_entries(packed.entries(), spec, kernels, packed.summary)
