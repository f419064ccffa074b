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
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from loraplex.adapters.seen_files import FileIdentity, SeenFiles, identities_of
from loraplex.core.errors import ConfigError
from loraplex.core.version import __version__
from loraplex.execution.weights.background_store import BackgroundStore, Pause
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

_VERSION = 4
"""Version of the cached weights, raised when the same checkpoint is to be packed differently."""
_SEEN_AS = "checkpoint"
_HASHING_THREADS = 4
_PIECE_BYTES = 4 << 20
_FORM_DIGITS = 16


def known_digest(identities: Sequence[FileIdentity], seen: SeenFiles) -> str | None:
    """Return what checkpoint_digest found of files with these identities; None: nothing yet."""
    return seen.find(tuple(identities), _SEEN_AS)


def checkpoint_digest(
    files: Sequence[Path], seen: SeenFiles | None = None, pause: Pause = lambda: None
) -> str:
    """SHA-256 of the files' contents, whatever their names; remembered by their identities.

    pause: called between pieces. Raises ConfigError if one cannot be read, and what `pause` raises.
    """
    identities = identities_of(files)
    known = None if seen is None else known_digest(identities, seen)
    if known is not None:
        return known
    with ThreadPoolExecutor(_HASHING_THREADS) as pool:
        digests = sorted(pool.map(functools.partial(_file_digest, pause=pause), files))
    digest = hashlib.sha256("".join(digests).encode()).hexdigest()
    if seen is not None and identities_of(files) == identities:
        try:
            seen.remember(identities, digest, _SEEN_AS)
        except OSError as error:
            logger.debug("cannot remember the checkpoint's digest: %s", error.strerror)
    return digest


def _file_digest(path: Path, pause: Pause) -> str:
    digest, piece = hashlib.sha256(), bytearray(_PIECE_BYTES)
    try:
        with path.open("rb", buffering=0) as file:
            while num_bytes := file.readinto(piece):
                pause()
                digest.update(memoryview(piece)[:num_bytes])
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    return digest.hexdigest()


def packed_key(digest: str, spec: ModelSpec, kernels: Kernels, form: WeightFormat) -> str:
    """Return a key that is equal only if the packed weights are. digest: of the checkpoint.

    It begins with packed_form.
    """
    prefix = packed_form(spec, kernels, form)
    return prefix + hashlib.sha256(f"{prefix} {digest}".encode()).hexdigest()[len(prefix) :]


def packed_form(spec: ModelSpec, kernels: Kernels, form: WeightFormat) -> str:
    """Return what is equal for checkpoints that would be packed alike, whatever their numbers."""
    # config.json decides how tensors are read, and the shapes show the decision.
    shapes = list(checkpoint_shapes(spec).items())
    parts = [(p.name, p.own_outputs, p.own_inputs, p.num_blocks) for p in linear_places(spec)]
    packing = (str(form.dtype), form.precision.value, kernels.packed_layout, __version__)
    stored = () if spec.stored_format is None else (spec.stored_format.values,)
    material = msgspec.json.encode((_VERSION, shapes, parts, *packing, *stored))
    return hashlib.sha256(material).hexdigest()[:_FORM_DIGITS]


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
    """The weights, and where they come from.

    Files that were never read are hashed in the background as well, unless what is in the cache
    could be made of a copy of them.
    """
    files, prefix = weight_files(folder), packed_form(spec, kernels, form)
    identities = identities_of(files)
    key = None
    with contextlib.ExitStack() as turns:
        digest = known_digest(identities, cache.seen)
        if digest is None:
            these = hashlib.sha256(msgspec.json.encode(identities)).hexdigest()
            turns.enter_context(cache.turn(prefix + these, str(folder), leaves_lock=False))
            is_known = known_digest(identities, cache.seen) is not None
            if is_known or cache.has(prefix):
                digest = checkpoint_digest(files, cache.seen)
        if digest is not None:
            key = packed_key(digest, spec, kernels, form)
            turns.enter_context(cache.turn(key, str(folder)))
            packed = cache.open(key)
            if packed is not None:
                return _mapped(packed, spec, kernels), str(packed.path)
        weights = pack_checkpoint(folder, spec, kernels, form)
        if identities_of(files) != identities:
            logger.warning("%s was changed while it was read: it is not cached", folder)
            return weights, str(folder)
        if key is None:
            key_of = functools.partial(packed_key, spec=spec, kernels=kernels, form=form)
            store = functools.partial(_store_unknown, cache, folder, files, key_of, weights)
        else:
            store = functools.partial(cache.store, key, weights.entries, weights.summary)
        # A process that waits for these turns maps the file once it is there.
        storing = BackgroundStore(store, turns.pop_all())
    return dataclasses.replace(weights, storing=storing), str(folder)


def _store_unknown(
    cache: PackedCache,
    folder: Path,
    files: Sequence[Path],
    key_of: Callable[[str], str],
    weights: PackedWeights,
    pause: Pause,
) -> None:
    """Store weights whose checkpoint was not hashed yet."""
    identities = identities_of(files)
    try:
        key = key_of(checkpoint_digest(files, cache.seen, pause))
    except ConfigError as error:
        logger.warning("the packed weights are not kept for the next start: %s", error.message)
        return
    if identities_of(files) != identities:
        logger.warning("%s was changed while it was read: it is not cached", folder)
        return
    with cache.turn(key, str(folder)):
        if cache.open(key) is None:
            cache.store(key, weights.entries, weights.summary, pause)


def _mapped(packed: PackedFile, spec: ModelSpec, kernels: Kernels) -> PackedWeights:
    return join_entries(packed.entries(), spec, kernels, packed.summary)
