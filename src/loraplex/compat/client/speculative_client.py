"""e2e_grpc_speculative_decoding_client.py: a draft model proposes, a target model decides.

In each round the draft model continues the tokens so far. The target model continues the same
tokens, with the draft tokens in its request: it returns the draft tokens that it accepts and one
token more (or, like loraplex, which needs no draft tokens, as many tokens of its own).
"""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from loraplex.compat.client.request_parts import (
    Array,
    Say,
    flag_tensors,
    postprocessing_tensors,
    prepared_tensors,
    row,
    text_of,
    texts,
)
from loraplex.compat.client.wire import Tensors, Wire, open_grpc_wire
from loraplex.compat.flags import Flags, check_at_least
from loraplex.core.errors import ConfigError


@dataclasses.dataclass(frozen=True, slots=True)
class _Model:
    """One of the two models, and what to print of its logits; empty: it returns none."""

    wire: Wire
    name: str
    tokens_title: str
    logits_title: str


def run(options: Flags, say: Say) -> int:
    """Return 0. Raises ConfigError."""
    check_at_least("--output-len", options.output_len, 1)
    check_at_least("--num-draft-tokens", options.num_draft_tokens, 0)
    if options.beam_width > 1:
        raise ConfigError(f"--beam-width {options.beam_width}: a beam search takes no draft tokens")
    of_draft = options.return_draft_model_draft_logits
    of_target = options.return_target_model_accepted_token_logits
    if of_draft and of_target:
        raise ConfigError(
            "logits come from the draft model or from the target model, not from both"
        )
    with (
        open_grpc_wire(options.url_target) as target_wire,
        open_grpc_wire(options.url_draft or options.url_target) as draft_wire,
    ):
        draft = _Model(
            *(draft_wire, options.draft_tensorrt_llm_model_name, "draft_tokens"),
            "draft model draft tokens' logits" if of_draft else "",
        )
        target = _Model(
            *(target_wire, options.target_tensorrt_llm_model_name, "Target model output_ids"),
            "target model accepted tokens' logits" if of_target else "",
        )
        text = _generate(options, draft, target, say)
    say("Final text:")
    say(f" {text}")
    return 0


def _generate(options: Flags, draft: _Model, target: _Model, say: Say) -> str:
    """Return the prompt and its output. Raises ConfigError."""
    prepared = _prepare(options, draft.wire)
    token_ids: list[int] = prepared["input_ids"][0].tolist()
    end_id, stop_words = int(prepared["end_id"].flat[0]), list(_words(prepared["stop_words_list"]))
    # By default a server lets no output begin with its end; but only the first round begins.
    prepared |= flag_tensors(options) | {"min_tokens": row([1])}
    limit = len(token_ids) + options.output_len
    is_finished = False
    while not is_finished:
        drafts: list[int] = []
        num_drafts = min(options.num_draft_tokens, limit - len(token_ids) - 1)
        if num_drafts > 0:
            outputs = _outputs(options, draft, prepared, token_ids, num_drafts)
            drafts = _token_ids(outputs, token_ids, draft)[len(token_ids) :]
            _print_round(options, draft, drafts, outputs, say)
        given = prepared | ({"draft_input_ids": row(drafts)} if drafts else {})
        outputs = _outputs(options, target, given, token_ids, len(drafts) + 1)
        decided = _token_ids(outputs, token_ids, target)
        _print_round(options, target, decided, outputs, say)
        is_finished = (
            len(decided) >= limit
            or decided in (token_ids, token_ids + drafts)  # the target had nothing to add
            or end_id in decided[len(token_ids) :]
            or any(decided[-len(word) :] == word for word in stop_words)
        )
        token_ids, prepared["min_tokens"] = decided, row([0])
    tensors = postprocessing_tensors(token_ids)
    pending = target.wire.submit(options.postprocessor_model_name, tensors, options.request_id)
    return text_of(pending.result().outputs["OUTPUT"])


def _prepare(options: Flags, wire: Wire) -> dict[str, Array]:
    """Return the tensors of the prompt by preprocessing."""
    tensors = {"QUERY": texts([[options.prompt]]), "REQUEST_OUTPUT_LEN": row([options.output_len])}
    for name, words in (("BAD", options.bad_words), ("STOP", options.stop_words)):
        if words:
            tensors[f"{name}_WORDS_DICT"] = texts([words])
    for name, token_id in (("END_ID", options.end_id), ("PAD_ID", options.pad_id)):
        if token_id is not None:
            tensors[name] = row([token_id])
    pending = wire.submit(options.preprocessor_model_name, tensors, options.request_id)
    return prepared_tensors(pending.result().outputs)


def _words(words_list: Array) -> Iterator[list[int]]:
    """Yield the words: row 0 has the ids of all words, row 1 the end of each word, then -1."""
    ids, ends = words_list[0].tolist()
    start = 0
    for end in ends:
        if end > start:
            yield ids[start:end]
            start = end


def _outputs(
    options: Flags,
    model: _Model,
    prepared: Tensors,
    token_ids: Sequence[int],
    num_tokens: int,
) -> Tensors:
    """Return the outputs of a model that continues the tokens."""
    tensors = {
        **prepared,
        "input_ids": row(token_ids),
        "input_lengths": row([len(token_ids)]),
        "request_output_len": row([num_tokens]),
    }
    if model.logits_title:
        tensors["return_generation_logits"] = row([True], np.bool_)
    return model.wire.submit(model.name, tensors, options.request_id).result().outputs


def _token_ids(outputs: Tensors, before: Sequence[int], model: _Model) -> list[int]:
    """Return prompt and output. Raises ConfigError for a model that leaves the prompt out."""
    length = int(outputs["sequence_length"].flat[0])
    token_ids: list[int] = outputs["output_ids"].reshape(-1)[:length].tolist()
    if token_ids[: len(before)] != list(before):
        raise ConfigError(
            f"{model.name} leaves out the prompt: its config.pbtxt must not have "
            "exclude_input_in_output"
        )
    return token_ids


def _print_round(
    options: Flags, model: _Model, token_ids: Sequence[int], outputs: Tensors, say: Say
) -> None:
    if options.verbose:
        say(f"{model.tokens_title}: {token_ids}")
        if model.logits_title:
            say(f"{model.logits_title}: {outputs['generation_logits'].shape}")
