"""The packed weights of an engine folder: written once by a build, mapped by every start after it.

They are what the weights cache would hold, under the same key: made for one kind of processor, one
type and one precision. Where another one is wanted they are passed over, and the native weights
of the same folder are packed.
"""

import logging
from pathlib import Path

from loraplex.core.errors import ConfigError
from loraplex.execution.weights.keys import checkpoint_digest, packed_key
from loraplex.execution.weights.packed_cache import PackedCache
from loraplex.execution.weights.packed_file import (
    PackedFile,
    PackedFileError,
    write_packed,
)
from loraplex.execution.weights.packing import WeightFormat, pack_checkpoint
from loraplex.execution.weights.weight_files import weight_files
from loraplex.kernels.ops import Kernels
from loraplex.models.engine_folder import PACKED_NAME, weights_digest
from loraplex.models.spec import ModelSpec

logger = logging.getLogger(__name__)


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
