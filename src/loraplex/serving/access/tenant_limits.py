"""How much of the server each tenant has: requests, tokens, and how many at once.

A request is counted when it comes in, also if it is refused for another reason. Its tokens are
reserved when it is admitted: the prompt's, and the longest outputs that it requests. At its end
unused ones are released. A request that a limit refused counts nowhere.
"""

import contextlib
import dataclasses
import math
from collections import defaultdict
from collections.abc import Collection, Iterator
from typing import Protocol

from loraplex.core.clock import Clock
from loraplex.core.errors import (
    InvalidParameterError,
    LoraplexError,
    PromptTooLongError,
    RateLimitedError,
)
from loraplex.core.principal import Principal, TenantUsage
from loraplex.core.task import Task
from loraplex.serving.access.sliding_window import SlidingWindow, Slot
from loraplex.serving.adapter_usage import AdapterUsage, UsedAdapter

_RETRY_SECONDS = 1.0
"""Retry-After, in seconds, for too many concurrent requests: the end of one is not known."""


class TenantCounts:
    """What one tenant has now."""

    def __init__(self) -> None:
        self.num_concurrent = 0
        self.requests = SlidingWindow()
        self.tokens = SlidingWindow()


class TenantGate:
    """Lets requests in. Runs on one event loop.

    The limits come with each principal: changed ones hold from the next request on.
    """

    def __init__(self, clock: Clock, usage: AdapterUsage) -> None:
        """usage: gets the counts of requests that end."""
        self._clock = clock
        self._usage = usage
        self._uses: defaultdict[str, TenantCounts] = defaultdict(TenantCounts)

    def use(self, tenant: str) -> TenantCounts:
        return self._uses[tenant]

    def usage(self, principal: Principal) -> TenantUsage:
        """Return how much of its limits a tenant uses now."""
        use, limits, now_ns = self._uses[principal.tenant], principal.limits, self._clock.now_ns()
        return TenantUsage(
            concurrent_requests=use.num_concurrent,
            requests_last_minute=(
                None if limits.requests_per_minute is None else use.requests.total(now_ns)
            ),
            tokens_last_minute=(
                None if limits.tokens_per_minute is None else use.tokens.total(now_ns)
            ),
        )

    @contextlib.contextmanager
    def admission(self, principal: Principal) -> Iterator["Lease"]:
        """Admit a request. Its lease ends here if it is refused; else end it with the response.

        Raises RateLimitedError.
        """
        use, limits, now_ns = self._uses[principal.tenant], principal.limits, self._clock.now_ns()
        most = limits.max_concurrent_requests
        if most is not None and use.num_concurrent >= most:
            raise RateLimitedError(
                f"tenant {principal.tenant!r} may have {most} requests at once, and has "
                f"{use.num_concurrent}: try again when one has ended",
                retry_after_seconds=_RETRY_SECONDS,
            )
        slot = None
        if limits.requests_per_minute is not None:
            wait = use.requests.seconds_until(now_ns, 1, limits.requests_per_minute)
            if wait > 0:
                raise RateLimitedError(
                    f"tenant {principal.tenant!r} may send {limits.requests_per_minute} requests "
                    f"a minute: try again in {math.ceil(wait)} s",
                    retry_after_seconds=wait,
                )
            slot = use.requests.charge(now_ns, 1)
        use.num_concurrent += 1
        lease = Lease(principal, use, self._clock, self._usage, slot)
        try:
            yield lease
        except BaseException as error:
            lease.end(is_error=isinstance(error, LoraplexError))
            raise


@dataclasses.dataclass(slots=True, eq=False)
class Lease:
    """One request's part of what its tenant has. It ends once."""

    _principal: Principal
    _use: TenantCounts
    _clock: Clock
    _usage: AdapterUsage
    _counted: Slot | None
    """Where the request was counted."""
    adapters: Collection[UsedAdapter] = ()
    """What the request will be counted for."""
    _num_prompt_tokens: int = 0
    _reserved: tuple[Slot, int] | None = None
    _is_over: bool = False

    def reserve(self, num_prompt_tokens: int, task: Task) -> None:
        """Reserve the tokens of an admitted request.

        Raises RateLimitedError; InvalidParameterError or PromptTooLongError for what no wait helps.
        """
        limits, now_ns = self._principal.limits, self._clock.now_ns()
        if limits.max_prompt_tokens is not None and num_prompt_tokens > limits.max_prompt_tokens:
            raise PromptTooLongError(
                f"the prompt has {num_prompt_tokens} tokens; tenant {self._principal.tenant!r} may "
                f"send at most {limits.max_prompt_tokens}",
                param="prompt",
            )
        if limits.max_n is not None and task.num_sequences > limits.max_n:
            raise InvalidParameterError(
                f"{task.num_sequences} outputs are requested; tenant {self._principal.tenant!r} "
                f"may have at most {limits.max_n} made for a prompt",
                param="n",
            )
        self._num_prompt_tokens = num_prompt_tokens
        limit = limits.tokens_per_minute
        if limit is None:
            return
        amount = num_prompt_tokens + task.max_new_tokens
        limited = f"tenant {self._principal.tenant!r} may have {limit} tokens a minute"
        max_prompt = limit - min(task.max_new_tokens, 1)
        if num_prompt_tokens > max_prompt:
            raise PromptTooLongError(
                f"{limited}, and the prompt has {num_prompt_tokens}: send one of at most "
                f"{max_prompt}",
                param="prompt",
            )
        if amount > limit:
            raise InvalidParameterError(
                f"{limited}, and this request needs up to {amount} (a prompt of "
                f"{num_prompt_tokens}, and {task.max_new_tokens} for max_tokens of all outputs): "
                "request fewer max_tokens",
                param="max_tokens",
            )
        wait = self._use.tokens.seconds_until(now_ns, amount, limit)
        if wait > 0:
            self.adapters = ()  # a request that a limit refused counts nowhere
            if self._counted is not None:
                self._use.requests.correct(self._counted, -1)
            taken = self._use.tokens.total(now_ns)
            raise RateLimitedError(
                f"{limited}: {taken} are used or reserved, and this request needs up to {amount}; "
                f"try again in {math.ceil(wait)} s, or request fewer "
                f"{'max_tokens' if task.max_new_tokens else 'tokens of the prompt'}",
                retry_after_seconds=wait,
            )
        self._reserved = self._use.tokens.charge(now_ns, amount), amount

    def end(self, num_tokens: int = 0, *, is_error: bool = False) -> None:
        """End the lease; num_tokens are those of the prompt and the outputs."""
        if self._is_over:
            return
        self._is_over = True
        num_prompt_tokens = min(num_tokens, self._num_prompt_tokens)
        self._usage.count(
            self._principal.tenant,
            self.adapters,
            num_prompt_tokens=num_prompt_tokens,
            num_output_tokens=num_tokens - num_prompt_tokens,
            is_error=is_error,
        )
        self._use.num_concurrent -= 1
        if self._reserved is not None:
            slot, amount = self._reserved
            self._use.tokens.correct(slot, num_tokens - amount)


class Endable(Protocol):
    """Lease of an admitted request: a `Lease`, or one that the owner of the limits has."""

    def end(self, num_tokens: int = 0, *, is_error: bool = False) -> None: ...
