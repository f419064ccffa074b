"""Memory of responses: what a request may return is counted before any of it is computed."""

from collections.abc import Mapping
from typing import Final

from loraplex.core.byte_sizes import readable_bytes
from loraplex.core.errors import InvalidParameterError
from loraplex.core.sampling_params import SamplingParams
from loraplex.core.task import Generate, Task
from loraplex.serving.access.tenant_bytes import SMALL_BYTES, TenantBytes
from loraplex.serving.wire_request import WireRequest, current_request

_LOGPROB_BYTES: Final = 100
"""Bytes of one token with its log probability as JSON. In memory it takes about as many."""


class ResponseMemory(TenantBytes):
    """Bytes of the responses that are computed, written and sent.

    Log probabilities, logits and repeated prompts count from the admission of their request, by the
    largest size that they may have. Other responses count while they are sent.
    """

    kind = "responses"

    def reserve(
        self,
        task: Task,
        num_prompt_tokens: int,
        vocab_size: int,
        logit_bytes: int,
        repeated_bytes: int = 0,
    ) -> None:
        """Reserve memory for a part of the current request until that ends.

        task: of an admitted request. A vector counts only while it is sent. repeated_bytes: see
        GenerateRequest. Raises InvalidParameterError if the response may be larger than a tenant's
        memory, NotReadyError if others take too much of it now. Without a request of a client there
        is no limit.
        """
        wire = current_request()
        if wire is None or not isinstance(task, Generate):
            return
        sizes = response_sizes(
            task.sampling, num_prompt_tokens, vocab_size, logit_bytes, repeated_bytes
        )
        num_bytes = sum(sizes.values())
        if wire.num_response_bytes + num_bytes <= SMALL_BYTES:
            return
        most = self.max_tenant_bytes
        if wire.num_response_bytes + num_bytes > most:
            param = max(sizes, key=sizes.__getitem__)
            parts = ", ".join(
                f"{name} {readable_bytes(size)}" for name, size in sizes.items() if size
            )
            raise InvalidParameterError(
                f"the response may have {readable_bytes(wire.num_response_bytes + num_bytes)} "
                f"({parts}), and the responses of a tenant may have {readable_bytes(most)} "
                "(max_bodies_bytes): request less of it, or fewer prompts, outputs or max_tokens "
                "at a time",
                param=param,
            )
        self._take_for(wire, num_bytes)

    def count(self, num_bytes: int) -> None:
        """Count the response of the current request until that ends, unless it has reserved memory.

        Raises NotReadyError if others take too much of it now.
        """
        wire = current_request()
        if wire is not None and num_bytes > SMALL_BYTES and not wire.num_response_bytes:
            self._take_for(wire, num_bytes)

    def _take_for(self, wire: WireRequest, num_bytes: int) -> None:
        tenant = wire.tenant
        self.take(tenant, num_bytes)
        wire.num_response_bytes += num_bytes
        wire.when_ended(lambda: self.release(tenant, num_bytes))


def response_sizes(
    sampling: SamplingParams,
    num_prompt_tokens: int,
    vocab_size: int,
    logit_bytes: int,
    repeated_bytes: int = 0,
) -> Mapping[str, int]:
    """Return the largest size in bytes of what a response may have, by the parameter for it.

    Each of n outputs may repeat what is returned of the prompt.
    """
    assert sampling.max_tokens is not None
    num_tokens = sampling.num_sequences * sampling.max_tokens
    num_repeated = sampling.n * num_prompt_tokens
    logits = vocab_size * logit_bytes
    prompt_scores, scores = (
        0 if num_top is None else (1 + num_top) * _LOGPROB_BYTES
        for num_top in (sampling.prompt_logprobs, sampling.logprobs)
    )
    return {
        "prompt": num_repeated * repeated_bytes,
        "prompt_logprobs": num_repeated * prompt_scores,
        "logprobs": num_tokens * scores,
        "return_context_logits": num_repeated * logits * sampling.return_prompt_logits,
        "return_generation_logits": num_tokens * logits * sampling.return_logits,
    }
