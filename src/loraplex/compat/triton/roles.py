"""Role of each model of a repository, from its configuration."""

import enum
from collections.abc import Mapping
from types import MappingProxyType

from loraplex.compat.triton.model_folder import ModelFolder
from loraplex.compat.triton.pbtxt import is_placeholder
from loraplex.core.errors import ConfigError
from loraplex.frontends.kserve.models.kinds import (
    BLS,
    ENSEMBLE,
    POSTPROCESSING,
    PREPROCESSING,
    TENSORRT_LLM,
    VLLM,
    ModelKind,
)


class Role(enum.Enum):
    ENSEMBLE = "ensemble"
    PREPROCESSING = "preprocessing"
    TENSORRT_LLM = "tensorrt_llm"
    POSTPROCESSING = "postprocessing"
    BLS = "tensorrt_llm_bls"
    VLLM = "vllm"


KINDS: Mapping[Role, ModelKind] = MappingProxyType(
    {
        Role.ENSEMBLE: ENSEMBLE,
        Role.PREPROCESSING: PREPROCESSING,
        Role.TENSORRT_LLM: TENSORRT_LLM,
        Role.POSTPROCESSING: POSTPROCESSING,
        Role.BLS: BLS,
        Role.VLLM: VLLM,
    }
)
_BY_INPUTS = (
    ({"QUERY"}, Role.PREPROCESSING),
    ({"TOKENS_BATCH"}, Role.POSTPROCESSING),
    ({"input_ids", "request_output_len"}, Role.TENSORRT_LLM),
    ({"text_input", "max_tokens"}, Role.BLS),
)
_LLM_API_FILE = "model.yaml"


def role_of(folder: ModelFolder) -> Role:
    """Raises ConfigError for a model that is none of those that are served."""
    config = folder.config
    if config.platform == "ensemble":
        return Role.ENSEMBLE
    if config.backend == "vllm":
        return Role.VLLM
    if config.backend == "tensorrtllm":
        return Role.TENSORRT_LLM
    if (folder.version_path / _LLM_API_FILE).is_file():
        raise ConfigError(
            f"{folder.version_path / _LLM_API_FILE}: a model of TensorRT-LLM's LLM API is not "
            "served from a repository; give its folder to `loraplex serve`"
        )
    if config.backend == "python" or not config.backend or is_placeholder(config.backend):
        names = {row.name for row in config.input}
        role = next((role for needed, role in _BY_INPUTS if needed <= names), None)
        if role is not None:
            return role
    what = f"platform {config.platform!r}" if config.platform else f"backend {config.backend!r}"
    raise ConfigError(
        f"{folder.line_of('platform' if config.platform else 'backend')}: model '{folder.name}' of "
        f"{what} is not served; supported: ensembles, the backends tensorrtllm and vllm, and "
        "with the backend python TensorRT-LLM's preprocessing (input QUERY), postprocessing (input "
        "TOKENS_BATCH), tensorrt_llm (input_ids, request_output_len) and tensorrt_llm_bls "
        "(text_input, max_tokens)"
    )
