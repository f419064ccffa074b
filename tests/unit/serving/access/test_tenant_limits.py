"""Each limit of a tenant: what is let in, what is refused and with which words."""

import contextlib

import pytest

from loraplex.core.errors import (
    InvalidParameterError,
    PromptTooLongError,
    RateLimitedError,
)
from loraplex.core.output import FinishReason, RequestOutput, SequenceOutput
from loraplex.core.principal import Principal, TenantLimits, TenantUsage
from loraplex.core.request import GenerateRequest
from loraplex.core.sampling_params import SamplingParams
from loraplex.core.task import Generate, Pool
from loraplex.serving.access.tenant_limits import TenantGate
from loraplex.serving.adapter_usage import AdapterUsage
from loraplex.serving.request_metrics import RequestMetrics
from loraplex.serving.wire_request import GenerationRecord
from loraplex.testing.fake_clock import FakeClock
from support.naming import naming, refused


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def gate(clock):
    return TenantGate(clock, AdapterUsage())


def tenant(name="acme", **limits):
    return Principal(name, limits=TenantLimits(**limits))


def enter(gate, principal, prompt=None, **sampling):
    """The lease of an admitted request."""
    with gate.admission(principal) as lease:
        if prompt is not None:
            lease.reserve(prompt, Generate(SamplingParams(**sampling)))
    return lease


def test_without_limits_nothing_is_refused(gate):
    for _ in range(1000):
        enter(gate, tenant(), 100, max_tokens=100)


def test_usage_of_what_is_limited(gate, clock):
    assert gate.usage(tenant()) == TenantUsage(
        concurrent_requests=0, requests_last_minute=None, tokens_last_minute=None
    )
    acme = tenant(requests_per_minute=5, tokens_per_minute=100)
    lease = enter(gate, acme, 10, max_tokens=30)
    assert gate.usage(acme) == TenantUsage(
        concurrent_requests=1, requests_last_minute=1, tokens_last_minute=40
    )
    lease.end(num_tokens=12)
    clock.advance_seconds(30)
    assert gate.usage(acme) == TenantUsage(
        concurrent_requests=0, requests_last_minute=1, tokens_last_minute=12
    )
    clock.advance_seconds(31)
    assert gate.usage(acme).tokens_last_minute == 0
    assert gate.usage(tenant("other", tokens_per_minute=1)).tokens_last_minute == 0


class TestConcurrency:
    def test_one_too_many(self, gate):
        acme = tenant(max_concurrent_requests=2)
        first, _ = enter(gate, acme), enter(gate, acme)
        with refused(RateLimitedError, "'acme'", 2) as raised:
            enter(gate, acme)
        assert raised.value.retry_after_seconds == 1
        first.end()
        enter(gate, acme)

    def test_a_lease_ends_once(self, gate):
        acme = tenant(max_concurrent_requests=1)
        lease = enter(gate, acme)
        lease.end()
        lease.end()
        assert gate.use("acme").num_concurrent == 0

    def test_tenants_do_not_share(self, gate):
        enter(gate, tenant(max_concurrent_requests=1))
        enter(gate, tenant("other", max_concurrent_requests=1))

    def test_a_refused_request_gives_its_place_back(self, gate):
        acme = tenant(max_concurrent_requests=1)
        with contextlib.suppress(ZeroDivisionError), gate.admission(acme):
            raise ZeroDivisionError
        enter(gate, acme)

    def test_a_changed_limit_holds_at_once(self, gate):
        enter(gate, tenant(max_concurrent_requests=5))
        with pytest.raises(RateLimitedError):
            enter(gate, tenant(max_concurrent_requests=1))


class TestRequestRate:
    def test_one_too_many(self, gate, clock):
        acme = tenant(requests_per_minute=2)
        enter(gate, acme).end()
        clock.advance_seconds(10)
        enter(gate, acme).end()
        with pytest.raises(RateLimitedError, match=naming(2, 51)) as e:
            enter(gate, acme)
        assert e.value.retry_after_seconds == 51
        clock.advance_seconds(51)
        enter(gate, acme)
        with pytest.raises(RateLimitedError):
            enter(gate, acme)

    def test_what_a_limit_refused_is_not_counted(self, gate, clock):
        acme = tenant(requests_per_minute=2, max_concurrent_requests=1)
        lease = enter(gate, acme)
        with refused(RateLimitedError, "'acme'", 1):
            enter(gate, acme)
        lease.end()
        enter(gate, acme)

    def test_what_is_wrong_otherwise_is_counted(self, gate):
        acme = tenant(requests_per_minute=1)
        with contextlib.suppress(ZeroDivisionError), gate.admission(acme):
            raise ZeroDivisionError
        with refused(RateLimitedError, "'acme'", 1, "minute"):
            enter(gate, acme)


class TestTokenRate:
    def test_prompt_and_longest_outputs_are_reserved(self, gate):
        acme = tenant(tokens_per_minute=100)
        enter(gate, acme, 10, max_tokens=30, n=2)
        assert gate.use("acme").tokens.total(0) == 70
        with pytest.raises(
            RateLimitedError,
            match=naming(70, 31),
        ):
            enter(gate, acme, 1, max_tokens=30)
        enter(gate, acme, 1, max_tokens=29)

    def test_what_was_not_made_is_given_back(self, gate):
        acme = tenant(tokens_per_minute=100)
        lease = enter(gate, acme, 10, max_tokens=90)
        lease.end(13)
        assert gate.use("acme").tokens.total(0) == 13
        enter(gate, acme, 10, max_tokens=77)

    def test_a_refused_one_counts_nowhere(self, gate):
        acme = tenant(tokens_per_minute=100, requests_per_minute=2)
        enter(gate, acme, 10, max_tokens=90)
        with pytest.raises(RateLimitedError):
            enter(gate, acme, 10, max_tokens=1)
        use = gate.use("acme")
        assert (use.requests.total(0), use.tokens.total(0), use.num_concurrent) == (1, 100, 1)

    def test_when_to_try_again(self, gate, clock):
        acme = tenant(tokens_per_minute=100)
        enter(gate, acme, 10, max_tokens=50)
        clock.advance_seconds(20)
        with pytest.raises(RateLimitedError) as raised:
            enter(gate, acme, 10, max_tokens=50)
        assert raised.value.retry_after_seconds == 41
        clock.advance_seconds(41)
        enter(gate, acme, 10, max_tokens=50)

    def test_no_wait_helps_a_request_over_the_limit(self, gate):
        with pytest.raises(InvalidParameterError, match=naming(101, "max_tokens")) as raised:
            enter(gate, tenant(tokens_per_minute=100), 1, max_tokens=100)
        assert raised.value.param == "max_tokens"

    def test_an_error_names_what_the_client_can_change(self, gate):
        """A pooled request has no max_tokens, and fewer of them help no prompt over the limit."""
        acme = tenant(tokens_per_minute=100)
        for num_prompt, task, most in (
            (101, Pool(), 100),
            (100, Generate(SamplingParams(max_tokens=1)), 99),
            (200, Generate(SamplingParams(max_tokens=50)), 99),
        ):
            with (
                pytest.raises(PromptTooLongError, match=naming(num_prompt, most)) as raised,
                gate.admission(acme) as lease,
            ):
                lease.reserve(num_prompt, task)
            assert raised.value.param == "prompt"
            assert "max_tokens" not in raised.value.message
        with gate.admission(acme) as lease:
            lease.reserve(100, Pool())
        with (
            pytest.raises(RateLimitedError, match=naming(100, 7, "prompt")) as raised,
            gate.admission(acme) as lease,
        ):
            lease.reserve(7, Pool())
        assert "max_tokens" not in raised.value.message
        with pytest.raises(RateLimitedError, match=naming(100, 8, "max_tokens")):
            enter(gate, acme, 7, max_tokens=1)


def test_sizes(gate):
    acme = tenant(max_prompt_tokens=10, max_n=2)
    enter(gate, acme, 10, max_tokens=1, n=2)
    with pytest.raises(PromptTooLongError, match=naming(11, "acme", 10)):
        enter(gate, acme, 11, max_tokens=1)
    with refused(InvalidParameterError, 3, "'acme'", 2, param="n"):
        enter(gate, acme, 1, max_tokens=1, n=1, best_of=3)


class Outputs:
    """A generation that was scripted."""

    adapters = ()
    num_prompt_tokens = 5

    def __init__(self, *outputs):
        self._outputs = list(outputs)
        self.is_closed = False

    async def __anext__(self):
        if not self._outputs:
            raise StopAsyncIteration
        output = self._outputs.pop(0)
        if isinstance(output, Exception):
            raise output
        return output

    async def aclose(self):
        self.is_closed = True


def output(num_tokens, *, finished=False):
    reason = FinishReason.STOP if finished else None
    return RequestOutput(
        request_id=1,
        client_request_id="",
        model="m",
        adapters=(),
        prompt_token_ids=(1,) * 5,
        sequences=(SequenceOutput(0, "x", (1,), (), reason),),
        num_output_tokens=num_tokens,
        finished=finished,
    )


class TestTheEndOfARequest:
    @pytest.fixture
    def acme(self):
        return tenant(tokens_per_minute=100)

    def leased(self, gate, acme, *outputs):
        request = GenerateRequest(request_id=1, model="m", prompt="Hi")
        record, lease = GenerationRecord(request, "acme", 0), enter(gate, acme, 5, max_tokens=50)
        return RequestMetrics().observe(request, Outputs(*outputs), record, lease)

    def use(self, gate):
        use = gate.use("acme")
        return use.num_concurrent, use.tokens.total(0)

    async def test_the_last_output(self, gate, acme):
        outputs = self.leased(gate, acme, output(1), output(3, finished=True))
        await anext(outputs)
        assert self.use(gate) == (1, 55)
        await anext(outputs)
        assert self.use(gate) == (0, 8)

    async def test_an_error(self, gate, acme):
        outputs = self.leased(gate, acme, output(2), ZeroDivisionError())
        await anext(outputs)
        with pytest.raises(ZeroDivisionError):
            await anext(outputs)
        assert self.use(gate) == (0, 7)

    async def test_leaving_early_costs_the_whole_prompt(self, gate, acme):
        outputs = self.leased(gate, acme, output(2))
        await outputs.aclose()
        assert outputs._outputs.is_closed
        assert self.use(gate) == (0, 5)
