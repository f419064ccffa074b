"""Reads what a folder states of scores of pairs: the files of a cross-encoder of
sentence-transformers, and the fields of config.json that vLLM reads. Free of torch.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from loraplex.core.errors import ConfigError
from loraplex.core.score_format import (
    QWEN3_INSTRUCTION,
    QWEN3_RERANKER,
    PairTemplate,
    ScoreFormat,
    ScoreKind,
)
from loraplex.models.config_fields import ConfigFields
from loraplex.models.sentence_transformers import (
    TRANSFORMER,
    activation_function,
    optional_fields,
    read_modules,
    read_prompts,
)

FIELDS: Final = (
    *("classifier_from_token", "is_original_qwen3_reranker", "method"),
    *("sentence_transformers", "sbert_ce_default_activation_function", "template"),
)
"""Fields that the setting score_config may have: those of config.json, and `template`."""
_SOFTMAX: Final = "from_2_way_softmax"
_METHODS: Final = (_SOFTMAX, "no_post_processing")
_ACTIVATIONS: Final = ("Sigmoid", "Identity")
_UNKNOWN: Final = (
    "its folder does not state how. It may have Pooling in modules.json (an embedding model), a "
    "classification head with one label, or the tokens of its judgement: LogitScore in "
    "modules.json, or classifier_from_token in config.json or in the setting score_config"
)


def read_score_format(
    folder: Path,
    replacements: Mapping[str, Any],
    token_ids: Callable[[str], Sequence[int]],
    *,
    num_labels: int,
    generates: bool,
    renders: bool,
) -> ScoreFormat:
    """Read the format of a folder's scores.

    replacements: of fields of its config.json. token_ids: function from a text to its tokens.
    num_labels: of its classification head, 0 without one. renders: whether the operator gave a
    chat template. Raises ConfigError for a broken file or replacement.
    """
    for name in replacements.keys() - FIELDS:
        raise ConfigError(f"score_config has no {name!r}; it may have {', '.join(FIELDS)}")
    config = optional_fields(folder / "config.json").with_values(replacements)
    transformer, modules = optional_fields(folder / TRANSFORMER), read_modules(folder)
    names = [name for name, _ in modules]
    options = (transformer.table("processing_kwargs") or transformer).table("chat_template")
    modality = transformer.table("modality_config")
    text = config.text("template", "")
    is_qwen3 = config.boolean("is_original_qwen3_reranker", False)
    fields: dict[str, Any] = {
        "template": PairTemplate.of(text or QWEN3_RERANKER) if text or is_qwen3 else None,
        "renders": renders or (modality is not None and "message" in modality),
        "template_options": {} if options is None else dict(options.values),
        "instruction": read_prompts(folder).text(None) or QWEN3_INSTRUCTION * is_qwen3,
    }
    if "LogitScore" in names:
        if names != ["Transformer", "LogitScore"]:
            return ScoreFormat(
                problem=f"its modules {', '.join(names)} are not computed", wants_head=True
            )
        path = folder / modules[1][1] / "config.json"
        score = optional_fields(path)
        false_id = score.optional_integer("false_token_id")
        ids = (score.integer("true_token_id"), *(() if false_id is None else (false_id,)))
        fields |= {"kind": ScoreKind.TOKENS, "token_ids": ids, "renders": True}
    elif tokens := config.texts("classifier_from_token"):
        fields |= {"kind": ScoreKind.TOKENS, "token_ids": _judgement(config, tokens, token_ids)}
    elif "Pooling" in names or not (num_labels or generates):
        return ScoreFormat(kind=ScoreKind.VECTORS)
    elif num_labels != 1:
        fields["problem"] = f"its head has {num_labels} labels, not one" if num_labels else _UNKNOWN
        fields["wants_head"] = True
    activation = activation_function(folder, config).rpartition(".")[2] or _ACTIVATIONS[0]
    if activation not in _ACTIVATIONS:
        fields["problem"] = f"its activation function {activation} is not computed"
        fields["wants_head"] = False
    return ScoreFormat(**fields, is_probability=activation == _ACTIVATIONS[0])


def _judgement(
    config: ConfigFields, tokens: Sequence[str], token_ids: Callable[[str], Sequence[int]]
) -> tuple[int, ...]:
    """Return the token of a match, and the one that it must exceed, which the field has first."""
    default = _SOFTMAX if len(tokens) > 1 else _METHODS[1]
    method = config.text("method", default)
    if method not in _METHODS or len(tokens) != (2 if method == _SOFTMAX else 1):
        raise ConfigError(
            f"{config.source}: classifier_from_token must have two tokens for the method "
            f"{_SOFTMAX}, one for {_METHODS[1]}; got {list(tokens)} and method {method!r}"
        )
    runs = {token: token_ids(token) for token in tokens}
    for token, run in runs.items():
        if len(run) != 1:
            raise ConfigError(
                f"{config.source}: {token!r} of classifier_from_token is {len(run)} tokens of the "
                "model, not one"
            )
    return tuple(runs[token][0] for token in reversed(tokens))
