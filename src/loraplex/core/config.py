"""Settings of a server and of its models. `config_layers` joins the places that set them."""

import functools
from types import MappingProxyType
from typing import Annotated, Any, Final

import msgspec

from loraplex.core.adapter import EXPERT_LORA_CHOICES, ExpertLoraLayout
from loraplex.core.engine_settings import EngineSettings
from loraplex.core.errors import ConfigError
from loraplex.core.grammar import GrammarLimits
from loraplex.core.server_config import ServerConfig
from loraplex.core.setting import Setting, setting_fields
from loraplex.core.tools import REASONING_PARSERS, TOOL_CALL_PARSERS

_model = functools.partial(Setting, "Model")
_adapters = functools.partial(Setting, "Adapters")
_chat = functools.partial(Setting, "Chat")
_engine = functools.partial(Setting, "Engine")

_TOOL_CALL_ALIASES: Final = MappingProxyType(
    {
        "llama4_json": "llama3_json",
        "llama4_pythonic": "pythonic",
        "granite-20b-fc": "granite",
        "qwen3_xml": "qwen3_coder",
        "granite4": "hermes",
        "nemotron_nano_v2": "nemotron_json",
        "qwen25": "hermes",
        "deepseekv3": "deepseek_v3",
    }
)
"""vLLM's and SGLang's names of parsers."""
_MIN_STEP_TIMEOUT: Final = 3
_REASONING_ALIASES: Final = MappingProxyType(
    dict.fromkeys(
        ("deepseek_r1", "deepseek-r1", "qwen3", "glm45", "nano_v3", "nemotron_v3"), "think"
    )
)


def _step_timeout(seconds: float) -> str | None:
    """An engine without work shows every second that it is alive."""
    return (
        None
        if seconds == 0 or seconds >= _MIN_STEP_TIMEOUT
        else (f"must be 0 or at least {_MIN_STEP_TIMEOUT}")
    )


def _expert_layout_problem(words: tuple[str, ...]) -> str | None:
    unknown = [word for word in words if word not in set(ExpertLoraLayout)]
    if unknown:
        return f"must be of {', '.join(ExpertLoraLayout)}; got {unknown[0]}"
    for pair in EXPERT_LORA_CHOICES:
        if all(word in words for word in pair):
            return f"must have one of {' and '.join(pair)}"
    return None


class AdapterConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One adapter to load at the start."""

    path: str
    task_id: int | None = None
    optional: bool = False
    """The server starts without it if it does not load, reports the reason to requests, and takes
    it once its files are right."""


class ModelConfig(EngineSettings, frozen=True, kw_only=True):
    """One served base model and its engine."""

    path: Annotated[
        str,
        _model(
            "Hugging Face folder or hub id (the argument `MODEL`)",
            is_file_only=True,
        ),
    ]
    served_names: Annotated[
        tuple[str, ...],
        _model(
            "Further names of the model in requests",
            "`--served-model-name NAME OTHER ...` names the model and gives it further names. "
            "/v1/models lists all of them.",
            is_file_only=True,
            has_commas=False,
        ),
    ] = ()
    revision: Annotated[
        str | None, _model("Branch, tag or commit of a hub id", default="the newest")
    ] = None
    tokenizer: Annotated[
        str, _model("Folder or hub id of the tokenizer's files", default="the model's")
    ] = ""
    tokenizer_config: Annotated[
        dict[str, Any],
        _model(
            "Replacements of entries of tokenizer_config.json, such as `eos_token`",
            "null removes an entry.",
            default="none",
            is_file_only=True,
        ),
    ] = msgspec.field(default_factory=dict)
    score_config: Annotated[
        dict[str, Any],
        _model(
            "Replacements of the entries of config.json that state how pairs of texts are scored, "
            "such as `classifier_from_token`, and `template`: the prompt of a pair, with the "
            "places {instruction}, {query} and {document}",
            default="none",
            is_file_only=True,
        ),
    ] = msgspec.field(default_factory=dict)
    max_input_len: Annotated[
        int | None,
        _model(
            "Maximum number of tokens of a prompt",
            default="what max_model_len leaves",
            minimum=1,
        ),
    ] = None
    chat_template: Annotated[
        str | None,
        _chat("Jinja file that replaces the chat template", default="the folder's own"),
    ] = None
    tool_call_parser: Annotated[
        str,
        _chat(
            "Format of the model's tool calls; auto: detected from the chat template",
            "See [Tools](tools.md).",
            choices=("auto", *TOOL_CALL_PARSERS),
            value_aliases=_TOOL_CALL_ALIASES,
        ),
    ] = "auto"
    reasoning_parser: Annotated[
        str,
        _chat(
            "Format of the model's reasoning: auto, none, think or mistral",
            "[Reasoning](tools.md#reasoning) is then separate from a message's content. `auto`: "
            "detected from the chat template; `none`: reasoning is part of the content.",
            choices=("auto", "none", *REASONING_PARSERS),
            value_aliases=_REASONING_ALIASES,
        ),
    ] = "auto"
    json_start_token: Annotated[
        str, _chat("Special token before a tool call, with the dialect llgtrt_compat")
    ] = ""
    grammar_limits: Annotated[
        GrammarLimits,
        _chat(
            "Limits of the cost of one grammar",
            "A table with `max_items_in_row`, `initial_lexer_fuel`, `step_lexer_fuel`, "
            "`step_max_items`, `max_lexer_states` and `max_grammar_size`.",
            default="llguidance's, with a fifth of its initial_lexer_fuel",
            is_file_only=True,
        ),
    ] = GrammarLimits()
    enable_lora: Annotated[
        bool, _adapters("Serving of adapters; off: requests for an adapter are refused")
    ] = True
    lora_target_modules: Annotated[
        tuple[str, ...],
        _adapters(
            "Linear layers that adapters may change, as attn_q, q_proj or moe_router; repeatable",
            default="any",
        ),
    ] = ()
    adapter_base_check: Annotated[
        str,
        _adapters(
            "Reaction to an adapter whose config names another base model: auto, warn or error",
            "`auto`: an error if it names another architecture or size (`Mistral-7B` on "
            "Llama-3-8B), a warning for another fine-tune. `error`: it is not loaded. `warn`: it "
            "is loaded all the same; its description has the warning. Shapes are always compared.",
            choices=("auto", "warn", "error"),
        ),
    ] = "auto"
    expert_lora_layout: Annotated[
        tuple[str, ...],
        _adapters(
            "Layout of LoRA of experts in files that fit two: rank_major or grouped_by_expert, "
            "unswapped or swapped; repeatable",
            "The first two are orders of the columns of Unsloth's `lora_B`, the other two are of "
            "square weights in files without `peft_version`. Files in which the config or "
            "shapes decide are read as they are.",
            default="none: such files are refused",
            check=_expert_layout_problem,
        ),
    ] = ()
    adapters: Annotated[
        dict[str, AdapterConfig],
        _adapters(
            "Adapters by name",
            "A table `[models.NAME.adapters.ADAPTER]` with `path`, `task_id` (`--adapter "
            "ADAPTER=PATH,task_id=N`) and `optional`: the server starts without it if it does not "
            "load, reports the reason to requests, and takes it once its files are right.",
            default="none",
            is_file_only=True,
        ),
    ] = msgspec.field(default_factory=dict)
    adapter_dirs: Annotated[
        tuple[str, ...],
        _adapters(
            "Folders of adapters: each sub-folder with an adapter is one of that name",
            "The flag is `--adapter-dir`.",
            is_file_only=True,
            has_commas=False,
        ),
    ] = ()
    lora_root: Annotated[
        str,
        _adapters(
            "Folder whose adapters, at any depth, are named by their path in it",
            "An adapter is a folder, or a file without its ending `.safetensors` or `.gguf`.",
        ),
    ] = ""
    multi_lora: Annotated[
        str,
        _adapters(
            'JSON file {"NAME": "PATH"} of adapters',
            "The format is that of Triton's vLLM backend (`multi_lora.json`).",
        ),
    ] = ""
    engine_restart_seconds: Annotated[
        float,
        _engine(
            "Time in seconds that the requests of an engine that died wait for the next one",
            "The next engine continues them; after this time they end with the error "
            "`engine_restarted`.",
            minimum=0,
        ),
    ] = 300.0
    engine_wait_seconds: Annotated[
        float,
        _engine(
            "Time in seconds that new requests wait for an engine that restarts",
            "Then they are refused with status 503.",
            minimum=0,
        ),
    ] = 30.0
    step_timeout_seconds: Annotated[
        float,
        _engine(
            "Time in seconds without progress after which an engine is ended and restarted; 0: "
            "derived",
            "Its requests continue in the next engine. The derived time is 20 times what a step "
            "should take by the measured ones, at least 10 s (120 s on a GPU, where a step may "
            "compile kernels), and 300 s before any was measured.",
            check=_step_timeout,
        ),
    ] = 0.0
    engine_start_seconds: Annotated[
        float,
        _engine(
            "Time in seconds that an engine may take to load its model",
            "An engine that takes longer is ended.",
            minimum=1,
        ),
    ] = 3600.0
    iter_stats_max_iterations: Annotated[
        int, _engine("Number of newest steps that /v1/iterations returns", minimum=1)
    ] = 1000


class Sources(msgspec.Struct, frozen=True):
    """Places that set settings, by name; a setting that is not in them has its default."""

    server: dict[str, str] = {}
    models: dict[str, dict[str, str]] = {}


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All settings of a server."""

    server: ServerConfig = ServerConfig()
    models: dict[str, ModelConfig] = {}
    sources: Sources = Sources()
    """Written by `config_layers`; no source may set it."""
    state_name: str = ""
    """Name of the default state directory; empty: made of the models. No source may set it."""

    def __post_init__(self) -> None:
        """Raises ConfigError for a name that two models have."""
        models_by_name: dict[str, str] = {}
        for model, settings in self.models.items():
            for name in dict.fromkeys((model, *settings.served_names)):
                other = models_by_name.setdefault(name, model)
                if other != model:
                    raise ConfigError(
                        f"models.{model}.served_names: {name!r} is a name of model {other!r}, too: "
                        "give each name to one model"
                    )


SETTINGS: Final = MappingProxyType({**setting_fields(ServerConfig), **setting_fields(ModelConfig)})
"""Every setting by name: no model's setting has the name of a server's."""
ALIASES: Final = MappingProxyType(
    {alias: field.name for field in SETTINGS.values() for alias in field.setting.aliases}
)
"""Other names of settings, and the settings."""


def problem(field: str, value: Any) -> str | None:
    """Return what is wrong with the value of a setting, as the end of a sentence."""
    return SETTINGS[field].problem(value)
