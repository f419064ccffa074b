"""Every key of llgtrt.json5: its values, what it does here, and which setting of ours has it."""

import dataclasses
import enum
from types import MappingProxyType
from typing import Any, Final

from loraplex.core.grammar import GrammarLimits
from loraplex.core.support import Feature, Section, Support


class Kind(enum.Enum):
    """What values there are, for errors."""

    BOOL = "true or false"
    WHOLE = "a whole number of at least 0"
    SHARE = "a number from 0 to 1"
    TEXT = "a string"
    TOKEN = "a token: a string, or an object with its text in 'content'"
    OBJECT = "an object"

    def takes(self, value: Any) -> bool:
        match self:
            case Kind.BOOL:
                return isinstance(value, bool)
            case Kind.WHOLE:
                return type(value) is int and value >= 0
            case Kind.SHARE:
                return type(value) in (int, float) and 0 <= value <= 1
            case Kind.TEXT:
                return isinstance(value, str)
            case Kind.TOKEN:
                text = value.get("content") if isinstance(value, dict) else value
                return isinstance(text, str) and text != ""
            case Kind.OBJECT:
                return isinstance(value, dict)


@dataclasses.dataclass(frozen=True, slots=True)
class Key:
    """One key of one section."""

    name: str
    kind: Kind
    note: str
    setting: str = ""
    """The field of ModelConfig that takes its value."""
    support: Support = Support.WORKS
    default: Any = None
    """llgtrt's default, for keys without a setting of ours; None: null."""
    may_be_null: bool = False

    @property
    def feature(self) -> Feature:
        note = f"the setting `{self.setting}`" if self.setting and not self.note else self.note
        return Feature(self.name, self.support, note, self.kind.value)


def _key(name: str, kind: Kind, setting: str, note: str = "") -> Key:
    return Key(name, kind, note, setting)


def _no_effect(name: str, kind: Kind, default: Any, note: str) -> Key:
    return Key(name, kind, note, "", Support.NO_EFFECT, default, may_be_null=default is None)


_ONE_SIZE: Final = "sizes stay as they are set"

RUNTIME: Final = (
    _key(
        *("guaranteed_no_evict", Kind.BOOL, "batch_scheduler_policy"),
        "the setting `batch_scheduler_policy`: guaranteed_no_evict, or max_utilization",
    ),
    _key("max_batch_size", Kind.WHOLE, "max_num_seqs"),
    _key("max_num_tokens", Kind.WHOLE, "max_num_batched_tokens"),
    _key("max_queue_size", Kind.WHOLE, "max_queue_size"),
    _no_effect(
        *("enable_chunked_context", Kind.BOOL, True),
        "a prompt longer than a step is always computed in chunks",
    ),
    _key("enable_kv_cache_reuse", Kind.BOOL, "enable_prefix_cache"),
    _key("kv_cache_free_gpu_mem_fraction", Kind.SHARE, "kv_cache_fraction"),
    _key(
        *("kv_cache_host_memory_megabytes", Kind.WHOLE, "kv_cache_host_memory_bytes"),
        "the setting `kv_cache_host_memory_bytes`, in MiB",
    ),
    _no_effect(
        *("kv_cache_onboard_blocks", Kind.BOOL, True),
        "blocks in host memory always come back to the device",
    ),
    _no_effect("cross_kv_cache_fraction", Kind.SHARE, None, "no model here has an encoder"),
    _no_effect(
        *("secondary_offload_min_priority", Kind.WHOLE, None),
        "the blocks of preempted sequences are kept, whatever their priority",
    ),
    _no_effect(*("event_buffer_max_size", Kind.WHOLE, None), "there are no KV cache events"),
    _no_effect("enable_batch_size_tuning", Kind.BOOL, True, _ONE_SIZE),
    _no_effect("enable_max_num_tokens_tuning", Kind.BOOL, True, _ONE_SIZE),
)

_TOKEN_NOTE: Final = "replaces the one of tokenizer_config.json; null takes it away"

TOKENIZER: Final = (
    Key(
        *("chat_template", Kind.TEXT, "replaces the folder's; --chat-template wins"),
        may_be_null=True,
    ),
    Key(
        *("clean_up_tokenization_spaces", Kind.BOOL, "replaces the one of tokenizer_config.json"),
        may_be_null=True,
    ),
    *(
        Key(name, Kind.TOKEN, _TOKEN_NOTE, may_be_null=True)
        for name in (
            *("eos_token", "bos_token", "unk_token", "sep_token"),
            *("pad_token", "cls_token", "mask_token"),
        )
    ),
    Key(
        *("json_start_token", Kind.TEXT, "the special token before a tool call"),
        may_be_null=True,
    ),
    _no_effect(
        *("n_vocab_override", Kind.WHOLE, None),
        "the model determines how many tokens it scores",
    ),
)
"""Any other key is one of tokenizer_config.json, and replaces it."""

LIMITS: Final = tuple(
    _key(name, Kind.WHOLE, "grammar_limits", f"the setting `grammar_limits.{name}`")
    for name in GrammarLimits.__struct_fields__
)

LLGUIDANCE: Final = (
    Key("limits", Kind.OBJECT, "see below"),
    _no_effect(
        *("log_level", Kind.WHOLE, 1),
        "the response to a request reports what is wrong with its grammar",
    ),
)

_NO_PLUGIN: Final = "no plugin is run"

PY: Final = (
    Key(
        *("input_processor", Kind.TEXT, "a plugin would change the prompts: null serves without"),
        support=Support.REFUSED,
        may_be_null=True,
    ),
    _no_effect("hf_model_dir", Kind.TEXT, None, _NO_PLUGIN),
    _no_effect("visual_engine_dir", Kind.TEXT, None, _NO_PLUGIN),
    _no_effect("arguments", Kind.OBJECT, None, _NO_PLUGIN),
)

SECTIONS: Final = MappingProxyType(
    {"runtime": RUNTIME, "tokenizer": TOKENIZER, "llguidance": LLGUIDANCE, "py": PY}
)


def sections() -> tuple[Section, ...]:
    """The documentation of the file."""
    tables = {**SECTIONS, "llguidance.limits": LIMITS}
    return tuple(
        Section(f"`{title}`", tuple(key.feature for key in keys)) for title, keys in tables.items()
    )
