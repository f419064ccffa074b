"""test_max_queue_size.py: more requests at once than a queue takes; some must be refused."""

from loraplex.compat.client.array_files import read_token_ids
from loraplex.compat.client.codec import Encoded, FolderCodec
from loraplex.compat.client.flags import Say, check_at_least
from loraplex.compat.client.queue_options import QueueOptions
from loraplex.compat.client.token_request import check_request, request_tensors
from loraplex.compat.client.wire import open_wire
from loraplex.compat.client.workloads import FIRST_RANDOM_ID
from loraplex.core.errors import ConfigError

FULL = ("maximum queue size of", "exceeds maximum queue size")
"""In the refusals, in small letters: of the backend, and of Triton's own queue."""


def run(options: QueueOptions, say: Say) -> int:
    """0 if a request was refused because the queue is full. Raises ConfigError for any other
    error.
    """
    check_at_least("--num-requests", options.num_requests, 1)
    check_at_least("--input-len", options.input_len, 1)
    check_request(options)
    tensors = request_tensors(options, _prompt(options))
    concurrency = max(options.concurrency, options.num_requests)
    num_refused = 0
    with open_wire(options.protocol, options.url, concurrency) as wire:
        sent = [
            wire.submit(options.model_name, tensors, str(index))
            for index in range(options.num_requests)
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
    say(f"[INFO] {num_refused} of {options.num_requests} requests met a full queue.")
    return 0 if num_refused else 1


def _prompt(options: QueueOptions) -> Encoded:
    """Raises ConfigError."""
    if options.input_tokens_csv:
        token_ids = read_token_ids(options.input_tokens_csv)
    elif options.tokenizer_dir:
        return FolderCodec(options.tokenizer_dir).encode(options.text)
    else:
        token_ids = [FIRST_RANDOM_ID] * options.input_len
    return Encoded(token_ids, options.end_id, options.pad_id)
