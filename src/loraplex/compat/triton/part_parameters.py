"""The parameters of the models other than tensorrt_llm: a table for each states what they do, and
the rules for parameters of every model.
"""

import difflib
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from loraplex.compat.triton.model_folder import ModelFolder
from loraplex.compat.triton.notes import Notes
from loraplex.compat.triton.roles import Role
from loraplex.compat.triton.setting_rows import Kind, SettingRow, here, no_effect, refused
from loraplex.core.support import Support

_TOKENIZER = here(
    "tokenizer_dir", Kind.TEXT, "the tokenizer; all models of one base must mean the same"
)
_TOKENIZER_TYPE = no_effect("tokenizer_type", "the tokenizer's own files determine its type")
_MULTIMODAL = "a multimodal model"

PART_PARAMETERS: Mapping[Role, tuple[SettingRow, ...]] = MappingProxyType(
    {
        Role.PREPROCESSING: (
            _TOKENIZER,
            _TOKENIZER_TYPE,
            here("add_special_tokens", Kind.TEXT, "to a prompt; yes or no in several words [yes]"),
            refused("multimodal_model_path", _MULTIMODAL),
            no_effect("gpt_model_path", "of multimodal models"),
            no_effect("max_num_images", "of multimodal models"),
        ),
        Role.POSTPROCESSING: (
            _TOKENIZER,
            _TOKENIZER_TYPE,
            here("skip_special_tokens", Kind.TEXT, "in texts; yes or no in several words [yes]"),
        ),
        Role.BLS: (
            here("accumulate_tokens", Kind.TEXT, "every streamed text is the whole so far [no]"),
            here("tensorrt_llm_model_name", Kind.TEXT, "the model that it calls [tensorrt_llm]"),
            here(
                "tensorrt_llm_draft_model_name",
                Kind.TEXT,
                "lets requests set num_draft_tokens; no draft model is needed",
            ),
            refused("multimodal_encoders_name", _MULTIMODAL),
        ),
        Role.ENSEMBLE: (),
        Role.VLLM: (
            here(
                "ENABLE_VLLM_HEALTH_CHECK",
                Kind.TEXT,
                "true: while the engine is dead, requests are refused at once, and the model "
                "is not ready",
            ),
            here(
                "REPORT_CUSTOM_METRICS", Kind.TEXT, "true: the vllm:* families that count requests"
            ),
        ),
    }
)


def check_known(folder: ModelFolder, rows: Sequence[SettingRow], notes: Notes) -> None:
    """Note unknown parameters. Raises ConfigError for one that is similar to a known one."""
    known = [row.key for row in rows]
    for key in folder.parameters.keys:
        if key in known:
            continue
        close = difflib.get_close_matches(key, known, n=1, cutoff=0.8)
        if close:
            raise folder.parameters.error(
                key, f"there is no such parameter; did you mean {close[0]}?"
            )
        notes.warning(f"{folder.parameters.place(key)}: parameter {key} is not known: no effect")


def check_served(folder: ModelFolder, rows: Sequence[SettingRow], notes: Notes) -> None:
    """Note what has no effect. Raises ConfigError for what is refused."""
    for row in rows:
        value = folder.parameters.text(row.key)
        if value is None:
            continue
        if row.support is Support.NO_EFFECT:
            notes.info(f"{folder.name}: {row.key} has no effect: {row.reason}")
        if row.support is Support.REFUSED and value not in row.neutral:
            neutral = f"; leave it out or set {', '.join(row.neutral)}" if row.neutral else ""
            reason = f"{value}: {row.reason}, is not served{neutral}"
            raise folder.parameters.error(row.key, reason)
