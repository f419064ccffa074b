"""loraplex: one server for a base model and thousands of its LoRA adapters.

    from loraplex import LLM, SamplingParams

All that programs use of the library is here (docs/library.md). A name is imported when it is first
used: `import loraplex` takes milliseconds, `LLM` imports torch.
"""

import importlib
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from loraplex.core.version import __version__

if TYPE_CHECKING:
    from loraplex.app.async_llm import AsyncLLM
    from loraplex.app.llm import LLM
    from loraplex.app.llm_arguments import Adapter, Chat, RequestOptions
    from loraplex.app.llm_outputs import Classified, Completion, Embedded, Generated, Prompt, Scored
    from loraplex.core.beam_search import BeamSearch, EarlyStopping
    from loraplex.core.errors import (
        AdapterExistsError,
        AdapterLoadError,
        AdapterMismatchError,
        AdapterNotFoundError,
        AdapterTooLargeError,
        BodyTimeoutError,
        CapacityError,
        ConfigError,
        CrashingRequestError,
        DeadlineExceededError,
        EngineRestartedError,
        InternalError,
        InvalidAdapterError,
        InvalidParameterError,
        InvalidRequestError,
        InvalidTensorError,
        LoraplexError,
        ModelNotFoundError,
        NotReadyError,
        PayloadTooLargeError,
        PermissionDeniedError,
        PromptTooLongError,
        QueueFullError,
        RateLimitedError,
        RequestError,
        ResponseNotFoundError,
        RowFailedError,
        StepFailedError,
        StorageFullError,
        StorageUnavailableError,
        TokenOutOfVocabularyError,
        UnauthenticatedError,
        UnsupportedFeatureError,
        UnsupportedModelError,
        UploadNotFoundError,
    )
    from loraplex.core.grammar import Grammar, GrammarKind
    from loraplex.core.output import (
        FinishReason,
        RequestOutput,
        RequestTiming,
        ResolvedAdapter,
        SequenceOutput,
        TokenLogprob,
    )
    from loraplex.core.retention import KVRetention, TokenRangeRetention
    from loraplex.core.sampling_params import SamplingParams
    from loraplex.core.stats import EngineStats
    from loraplex.serving.adapter_cards import (
        AdapterCard,
        AdapterDetails,
        LoadReport,
        Unloaded,
        UnloadMode,
        VersionCard,
    )
    from loraplex.serving.compare import Compared, ComparedOutput, Difference, FirstDifference

__all__ = [
    "LLM",
    "Adapter",
    "AdapterCard",
    "AdapterDetails",
    "AdapterExistsError",
    "AdapterLoadError",
    "AdapterMismatchError",
    "AdapterNotFoundError",
    "AdapterTooLargeError",
    "AsyncLLM",
    "BeamSearch",
    "BodyTimeoutError",
    "CapacityError",
    "Chat",
    "Classified",
    "Compared",
    "ComparedOutput",
    "Completion",
    "ConfigError",
    "CrashingRequestError",
    "DeadlineExceededError",
    "Difference",
    "EarlyStopping",
    "Embedded",
    "EngineRestartedError",
    "EngineStats",
    "FinishReason",
    "FirstDifference",
    "Generated",
    "Grammar",
    "GrammarKind",
    "InternalError",
    "InvalidAdapterError",
    "InvalidParameterError",
    "InvalidRequestError",
    "InvalidTensorError",
    "KVRetention",
    "LoadReport",
    "LoraplexError",
    "ModelNotFoundError",
    "NotReadyError",
    "PayloadTooLargeError",
    "PermissionDeniedError",
    "Prompt",
    "PromptTooLongError",
    "QueueFullError",
    "RateLimitedError",
    "RequestError",
    "RequestOptions",
    "RequestOutput",
    "RequestTiming",
    "ResolvedAdapter",
    "ResponseNotFoundError",
    "RowFailedError",
    "SamplingParams",
    "Scored",
    "SequenceOutput",
    "StepFailedError",
    "StorageFullError",
    "StorageUnavailableError",
    "TokenLogprob",
    "TokenOutOfVocabularyError",
    "TokenRangeRetention",
    "UnauthenticatedError",
    "UnloadMode",
    "Unloaded",
    "UnsupportedFeatureError",
    "UnsupportedModelError",
    "UploadNotFoundError",
    "VersionCard",
    "__version__",
]

_MODULES: Final = MappingProxyType(
    {
        "AsyncLLM": "app.async_llm",
        "LLM": "app.llm",
        "Adapter": "app.llm_arguments",
        "Chat": "app.llm_arguments",
        "RequestOptions": "app.llm_arguments",
        "Classified": "app.llm_outputs",
        "Completion": "app.llm_outputs",
        "Embedded": "app.llm_outputs",
        "Generated": "app.llm_outputs",
        "Prompt": "app.llm_outputs",
        "Scored": "app.llm_outputs",
        "BeamSearch": "core.beam_search",
        "EarlyStopping": "core.beam_search",
        "Grammar": "core.grammar",
        "GrammarKind": "core.grammar",
        "FinishReason": "core.output",
        "RequestOutput": "core.output",
        "RequestTiming": "core.output",
        "ResolvedAdapter": "core.output",
        "SequenceOutput": "core.output",
        "TokenLogprob": "core.output",
        "KVRetention": "core.retention",
        "TokenRangeRetention": "core.retention",
        "SamplingParams": "core.sampling_params",
        "EngineStats": "core.stats",
        "AdapterCard": "serving.adapter_cards",
        "AdapterDetails": "serving.adapter_cards",
        "LoadReport": "serving.adapter_cards",
        "Unloaded": "serving.adapter_cards",
        "UnloadMode": "serving.adapter_cards",
        "VersionCard": "serving.adapter_cards",
        "Compared": "serving.compare",
        "ComparedOutput": "serving.compare",
        "Difference": "serving.compare",
        "FirstDifference": "serving.compare",
    }
)
"""Module of each name; all others are errors."""

if not TYPE_CHECKING:  # a type checker would take any name

    def __getattr__(name: str) -> Any:
        """Import a name on its first use."""
        if name not in __all__:
            raise AttributeError(f"module 'loraplex' has no attribute {name!r}")
        from loraplex.core.environment import let_threads_sleep  # noqa: PLC0415 - not free

        let_threads_sleep()  # before torch is imported
        module = importlib.import_module(f"loraplex.{_MODULES.get(name, 'core.errors')}")
        return getattr(module, name)


def __dir__() -> list[str]:
    return __all__
