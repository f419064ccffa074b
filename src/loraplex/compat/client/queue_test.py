"""test_max_queue_size.py: more requests at once than a queue takes; some must be refused."""

from loraplex.compat.client.benchmark import FIRST_RANDOM_ID
from loraplex.compat.client.request_parts import (
    Encoded,
    FolderCodec,
    Say,
    check_request,
    prompt_of,
    request_tensors,
)
from loraplex.compat.client.wire import open_wire
from loraplex.compat.flags import Flags, check_at_least
from loraplex.core.errors import ConfigError

FULL = ("maximum queue size of", "exceeds maximum queue size")
"""Words of the refusals in small letters: the backend's, and those of Triton's own queue."""


def run(options: Flags, say: Say) -> int:
    """Return 0 if a request was refused because the queue is full. Raises other errors."""
    num_requests = options.num_requests
    check_at_least("--num-requests", num_requests, 1)
    check_at_least("--input-len", options.input_len, 1)
    check_request(options)
    tensors = request_tensors(options, _prompt(options))
    num_refused = 0
    with open_wire(options, max(options.concurrency, num_requests)) as wire:
        sent = [
            wire.submit(options.model_name, tensors, str(index)) for index in range(num_requests)
        ]
        for pending in sent:
            try:
                pending.result()
            except ConfigError as error:
                if not any(words in error.message.lower() for words in FULL):
                    raise
                num_refused += 1
                if options.verbose:
                    say(error.message)
    say(f"[INFO] {num_refused} of {num_requests} requests met a full queue.")
    return 0 if num_refused else 1


def _prompt(options: Flags) -> Encoded:
    """Return the prompt of all requests. Raises ConfigError."""
    if not (options.tokenizer_dir or options.input_tokens_csv):
        return Encoded([FIRST_RANDOM_ID] * options.input_len, options.end_id, options.pad_id)
    uses_text = not options.input_tokens_csv
    return prompt_of(options, FolderCodec(options.tokenizer_dir) if uses_text else None)
