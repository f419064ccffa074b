"""e2e_grpc_speculative_decoding_client.py: a draft model proposes, a target model decides.

In each round the draft model continues the tokens so far. The target model continues the same
tokens, with the draft tokens in its request: it returns the draft tokens that it accepts and one
token more (or, like loraplex, which needs no draft tokens, as many tokens of its own).
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from loraplex.compat.client.codec import postprocessing_tensors
from loraplex.compat.client.files import Say
from loraplex.compat.client.tensors import Array, flag_tensors, row, text_of, texts
from loraplex.compat.client.wire import Wire, open_grpc_wire
from loraplex.compat.flags import Flags, check_at_least
from loraplex.core.errors import ConfigError


@dataclasses.dataclass(frozen=True, slots=True)
class _Prepared:
    """Output of preprocessing."""

    token_ids: list[int]
    words: Mapping[str, Array]
    """bad_words_list, stop_words_list, end_id, pad_id."""

    @property
    def end_id(self) -> int:
        return int(self.words["end_id"].flat[0])

    @property
    def stop_words(self) -> Iterator[list[int]]:
        """Row 0 of the tensor has the ids of all words, row 1 the end of each word, then -1."""
        ids, ends = self.words["stop_words_list"][0].tolist()
        start = 0
        for end in ends:
            if end > start:
                yield ids[start:end]
                start = end


def run(options: Flags, say: Say) -> int:
    """Return 0. Raises ConfigError."""
    check_at_least("--output-len", options.output_len, 1)
    check_at_least("--num-draft-tokens", options.num_draft_tokens, 0)
    if options.beam_width > 1:
        raise ConfigError(f"--beam-width {options.beam_width}: a beam search takes no draft tokens")
    if (
        options.return_draft_model_draft_logits
        and options.return_target_model_accepted_token_logits
    ):
        raise ConfigError(
            "logits come from the draft model or from the target model, not from both"
        )
    with (
        open_grpc_wire(options.url_target) as target,
        open_grpc_wire(options.url_draft or options.url_target) as draft,
    ):
        text = _generate(options, draft, target, say)
    say("Final text:")
    say(f" {text}")
    return 0


def _generate(options: Flags, draft: Wire, target: Wire, say: Say) -> str:
    """Return the prompt and its output. Raises ConfigError."""
    prepared = _prepare(options, draft)
    token_ids, limit = prepared.token_ids, len(prepared.token_ids) + options.output_len
    is_finished = False
    while not is_finished:
        drafts = _propose(options, draft, prepared, token_ids, limit - len(token_ids) - 1, say)
        decided = _decide(options, target, prepared, token_ids, drafts, say)
        is_finished = (
            len(decided) >= limit
            or decided in (token_ids, token_ids + drafts)  # the target had nothing to add
            or prepared.end_id in decided[len(token_ids) :]
            or any(decided[-len(word) :] == word for word in prepared.stop_words)
        )
        token_ids = decided
    tensors = postprocessing_tensors(token_ids)
    pending = target.submit(options.postprocessor_model_name, tensors, options.request_id)
    return text_of(pending.result().outputs["OUTPUT"])


def _prepare(options: Flags, wire: Wire) -> _Prepared:
    tensors = {"QUERY": texts([[options.prompt]]), "REQUEST_OUTPUT_LEN": row([options.output_len])}
    for name, words in (("BAD", options.bad_words), ("STOP", options.stop_words)):
        if words:
            tensors[f"{name}_WORDS_DICT"] = texts([words])
    for name, token_id in (("END_ID", options.end_id), ("PAD_ID", options.pad_id)):
        if token_id is not None:
            tensors[name] = row([token_id])
    pending = wire.submit(options.preprocessor_model_name, tensors, options.request_id)
    outputs = pending.result().outputs
    return _Prepared(
        outputs["INPUT_ID"][0].tolist(),
        {
            "bad_words_list": outputs["BAD_WORDS_IDS"],
            "stop_words_list": outputs["STOP_WORDS_IDS"],
            "end_id": outputs["OUT_END_ID"],
            "pad_id": outputs["OUT_PAD_ID"],
        },
    )


def _propose(
    options: Flags,
    wire: Wire,
    prepared: _Prepared,
    token_ids: Sequence[int],
    max_tokens: int,
    say: Say,
) -> list[int]:
    """Return the draft tokens of a round."""
    num_tokens = min(options.num_draft_tokens, max_tokens)
    if num_tokens <= 0:
        return []
    returns_logits = options.return_draft_model_draft_logits
    tensors = _tensors(options, prepared, token_ids, num_tokens, returns_logits)
    model = options.draft_tensorrt_llm_model_name
    outputs = wire.submit(model, tensors, options.request_id).result().outputs
    drafts = _token_ids(outputs, token_ids, model)[len(token_ids) :]
    if options.verbose:
        say(f"draft_tokens: {drafts}")
        if returns_logits:
            say(f"draft model draft tokens' logits: {outputs['generation_logits'].shape}")
    return drafts


def _decide(
    options: Flags,
    wire: Wire,
    prepared: _Prepared,
    token_ids: Sequence[int],
    drafts: Sequence[int],
    say: Say,
) -> list[int]:
    """Return all tokens after a round."""
    returns_logits = options.return_target_model_accepted_token_logits
    tensors = _tensors(options, prepared, token_ids, len(drafts) + 1, returns_logits)
    if drafts:
        tensors["draft_input_ids"] = row(drafts)
    model = options.target_tensorrt_llm_model_name
    outputs = wire.submit(model, tensors, options.request_id).result().outputs
    decided = _token_ids(outputs, token_ids, model)
    if options.verbose:
        say(f"Target model output_ids: {decided}")
        if returns_logits:
            say(f"target model accepted tokens' logits: {outputs['generation_logits'].shape}")
    return decided


def _tensors(
    options: Flags,
    prepared: _Prepared,
    token_ids: Sequence[int],
    num_tokens: int,
    returns_logits: bool,
) -> dict[str, Array]:
    tensors = {
        "input_ids": row(token_ids),
        "input_lengths": row([len(token_ids)]),
        "request_output_len": row([num_tokens]),
        # By default a server lets no output begin with its end; but only the first round begins.
        "min_tokens": row([token_ids == prepared.token_ids]),
        **prepared.words,
        **flag_tensors(options),
    }
    if returns_logits:
        tensors["return_generation_logits"] = row([True], np.bool_)
    return tensors


def _token_ids(outputs: Mapping[str, Array], before: Sequence[int], model: str) -> list[int]:
    """Return prompt and output. Raises ConfigError for a model that leaves the prompt out."""
    length = int(outputs["sequence_length"].flat[0])
    token_ids: list[int] = outputs["output_ids"].reshape(-1)[:length].tolist()
    if token_ids[: len(before)] != list(before):
        raise ConfigError(
            f"{model} leaves out the prompt: its config.pbtxt must not have exclude_input_in_output"
        )
    return token_ids
