"""e2e_grpc_speculative_decoding_client.py: a draft model guesses, a target model decides.

In each round the draft model goes on from what there is, and the target model from the same, with
the guesses: it answers with those that it agrees to and one token more (or, where it needs no
guesses, as loraplex, with as many tokens of its own).
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from loraplex.compat.client.flags import Say, check_at_least
from loraplex.compat.client.speculation_options import SpeculationOptions
from loraplex.compat.client.tensors import Array, row, texts
from loraplex.compat.client.wire import Wire, open_wire
from loraplex.core.errors import ConfigError

_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")


@dataclasses.dataclass(frozen=True, slots=True)
class _Prepared:
    """What preprocessing gives."""

    token_ids: list[int]
    words: Mapping[str, Array]
    """bad_words_list, stop_words_list, end_id, pad_id."""

    @property
    def end_id(self) -> int:
        return int(self.words["end_id"].flat[0])

    @property
    def stop_words(self) -> Iterator[list[int]]:
        """Row 0 of the tensor has the ids of all words, row 1 where each ends, then -1."""
        ids, ends = self.words["stop_words_list"][0].tolist()
        start = 0
        for end in ends:
            if end > start:
                yield ids[start:end]
                start = end


def run(options: SpeculationOptions, say: Say) -> int:
    """0. Raises ConfigError."""
    check_at_least("--output-len", options.output_len, 1)
    check_at_least("--num-draft-tokens", options.num_draft_tokens, 0)
    if options.beam_width > 1:
        raise ConfigError(f"--beam-width {options.beam_width}: a beam search cannot be guessed")
    if (
        options.return_draft_model_draft_logits
        and options.return_target_model_accepted_token_logits
    ):
        raise ConfigError(
            "logits come from the draft model or from the target model, not from both"
        )
    url_draft = options.url_draft or options.url_target
    with (
        open_wire("grpc", options.url_target, 1) as target,
        open_wire("grpc", url_draft, 1) as draft,
    ):
        text = speculate(options, draft, target, options.prompt, say)
    say("Final text:")
    say(f" {text}")
    return 0


def speculate(options: SpeculationOptions, draft: Wire, target: Wire, prompt: str, say: Say) -> str:
    """The prompt and its answer. Raises ConfigError."""
    tell = say if options.verbose else _nothing
    prepared = _prepare(options, draft, prompt)
    token_ids, limit = prepared.token_ids, len(prepared.token_ids) + options.output_len
    is_over = False
    while not is_over:
        guesses = _guess(options, draft, prepared, token_ids, limit - len(token_ids) - 1, tell)
        decided = _decide(options, target, prepared, token_ids, guesses, tell)
        is_over = (
            len(decided) >= limit
            or decided in (token_ids, token_ids + guesses)  # the target had nothing to add
            or prepared.end_id in decided[len(token_ids) :]
            or any(decided[-len(word) :] == word for word in prepared.stop_words)
        )
        token_ids = decided
    tensors = {
        "TOKENS_BATCH": np.array([[token_ids]], np.int32),
        "SEQUENCE_LENGTH": row([len(token_ids)], np.int32),
    }
    told = target.submit(options.postprocessor_model_name, tensors, options.request_id)
    return bytes(told.result().outputs["OUTPUT"].flat[0]).decode(errors="replace")


def _prepare(options: SpeculationOptions, wire: Wire, prompt: str) -> _Prepared:
    tensors = {
        "QUERY": texts([prompt]),
        "REQUEST_OUTPUT_LEN": row([options.output_len], np.int32),
    }
    if options.bad_words:
        tensors["BAD_WORDS_DICT"] = texts(options.bad_words)
    if options.stop_words:
        tensors["STOP_WORDS_DICT"] = texts(options.stop_words)
    if options.end_id is not None:
        tensors["END_ID"] = row([options.end_id], np.int32)
    if options.pad_id is not None:
        tensors["PAD_ID"] = row([options.pad_id], np.int32)
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


def _guess(
    options: SpeculationOptions,
    wire: Wire,
    prepared: _Prepared,
    token_ids: Sequence[int],
    room: int,
    tell: Say,
) -> list[int]:
    """At most as many as there is room for; the target adds one."""
    num = min(options.num_draft_tokens, room)
    if num <= 0:
        return []
    tensors = _tensors(options, prepared, token_ids, num)
    if options.return_draft_model_draft_logits:
        tensors["return_generation_logits"] = row([True], np.bool_)
    model = options.draft_tensorrt_llm_model_name
    outputs = wire.submit(model, tensors, options.request_id).result().outputs
    guesses = _token_ids(outputs, token_ids, model)[len(token_ids) :]
    tell(f"draft_tokens: {guesses}")
    if options.return_draft_model_draft_logits:
        tell(f"draft model draft tokens' logits: {outputs['generation_logits'].shape}")
    return guesses


def _decide(
    options: SpeculationOptions,
    wire: Wire,
    prepared: _Prepared,
    token_ids: Sequence[int],
    guesses: Sequence[int],
    tell: Say,
) -> list[int]:
    """All that there is then."""
    tensors = _tensors(options, prepared, token_ids, len(guesses) + 1)
    if guesses:
        tensors["draft_input_ids"] = row(guesses, np.int32)
    if options.return_target_model_accepted_token_logits:
        tensors["return_generation_logits"] = row([True], np.bool_)
    model = options.target_tensorrt_llm_model_name
    outputs = wire.submit(model, tensors, options.request_id).result().outputs
    decided = _token_ids(outputs, token_ids, model)
    tell(f"Target model output_ids: {decided}")
    if options.return_target_model_accepted_token_logits:
        tell(f"target model accepted tokens' logits: {outputs['generation_logits'].shape}")
    return decided


def _tensors(
    options: SpeculationOptions, prepared: _Prepared, token_ids: Sequence[int], num_new: int
) -> dict[str, Array]:
    tensors = {
        "input_ids": row(token_ids, np.int32),
        "input_lengths": row([len(token_ids)], np.int32),
        "request_output_len": row([num_new], np.int32),
        "beam_width": row([options.beam_width], np.int32),
        "temperature": row([options.temperature], np.float32),
        # Unless told, a server lets no answer begin with its end; but only the first round begins.
        "min_tokens": row([token_ids == prepared.token_ids], np.int32),
        **prepared.words,
    }
    for name in _PENALTIES:
        if (value := getattr(options, name)) is not None:
            tensors[name] = row([value], np.float32)
    return tensors


def _token_ids(outputs: Mapping[str, Array], before: Sequence[int], model: str) -> list[int]:
    """Prompt and answer. Raises ConfigError for a model that leaves the prompt out."""
    length = int(outputs["sequence_length"].flat[0])
    token_ids: list[int] = outputs["output_ids"].reshape(-1)[:length].tolist()
    if token_ids[: len(before)] != list(before):
        raise ConfigError(
            f"{model} answers without the prompt: its config.pbtxt must not have "
            "exclude_input_in_output"
        )
    return token_ids


def _nothing(line: str) -> None:
    del line
