"""The rates of tenants under any arrivals: no window has more than its limit, nothing is lost."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from loraplex.core.errors import InvalidParameterError, RateLimitedError
from loraplex.core.principal import Principal, TenantLimits
from loraplex.core.sampling_params import SamplingParams
from loraplex.core.task import Generate
from loraplex.serving.access.sliding_window import SLOT_NS, WINDOW_NS
from loraplex.serving.access.tenant_limits import TenantGate
from loraplex.serving.adapter_usage import AdapterUsage
from loraplex.testing.fake_clock import FakeClock

REQUESTS, TOKENS, CONCURRENT = 7, 100, 4
ACME = Principal(
    "acme",
    limits=TenantLimits(
        requests_per_minute=REQUESTS,
        tokens_per_minute=TOKENS,
        max_concurrent_requests=CONCURRENT,
    ),
)


def is_live(at, now):
    """A charge counts until its whole second is a window old."""
    return at - at % SLOT_NS + SLOT_NS + WINDOW_NS > now


class TenantLimitsMachine(RuleBasedStateMachine):
    """Every let in request is remembered with its time and what it costs by now."""

    def __init__(self):
        super().__init__()
        self.clock = FakeClock(start_ns=123_456_789)
        self.gate = TenantGate(self.clock, AdapterUsage())
        self.leases = {}
        self.times = []
        self.costs = []
        """Tokens by request: reserved or, once it ended, used."""
        self.counted = []
        """Times of all counted requests, with those that were refused as malformed."""

    @rule(seconds=st.floats(0, 70))
    def wait(self, seconds):
        self.clock.advance_seconds(seconds)

    @rule(prompt=st.integers(1, 60), max_tokens=st.integers(1, 60))
    def send_request(self, prompt, max_tokens):
        num_before = len(self.leases)
        try:
            with self.gate.admission(ACME) as lease:
                lease.reserve(prompt, Generate(SamplingParams(max_tokens=max_tokens)))
        except InvalidParameterError:
            assert prompt + max_tokens > TOKENS
            self.counted.append(self.clock.now_ns())
            return
        except RateLimitedError as error:
            self.check_wait(error, prompt + max_tokens, num_before)
            return
        assert num_before < CONCURRENT
        self.leases[len(self.times)] = lease, prompt, max_tokens
        self.times.append(self.clock.now_ns())
        self.costs.append(prompt + max_tokens)
        self.counted.append(self.clock.now_ns())

    def check_wait(self, error, amount, num_concurrent):
        """Every refusal has a reason, and reports a time after which the reason is gone."""
        if num_concurrent >= CONCURRENT:
            return
        wait_ns = round(error.retry_after_seconds * 1e9)
        assert 0 < wait_ns <= WINDOW_NS + SLOT_NS
        now = self.clock.now_ns()
        too_many = self.num_counted(now) >= REQUESTS
        assert too_many or self.spent(now) + amount > TOKENS
        if too_many:
            assert self.num_counted(now + wait_ns - 1) >= REQUESTS > self.num_counted(now + wait_ns)
        else:
            assert self.spent(now + wait_ns - 1) + amount > TOKENS
            assert self.spent(now + wait_ns) + amount <= TOKENS

    def spent(self, now):
        costs = zip(self.times, self.costs, strict=True)
        return sum(cost for at, cost in costs if is_live(at, now))

    def num_counted(self, now):
        return sum(is_live(at, now) for at in self.counted)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def end(self, data):
        number = data.draw(st.sampled_from(sorted(self.leases)))
        lease, prompt, max_tokens = self.leases.pop(number)
        used = data.draw(st.integers(prompt, prompt + max_tokens))
        lease.end(used)
        self.costs[number] = used

    @invariant()
    def no_window_has_more_than_its_limit(self):
        for end in self.times:
            inside = [end - WINDOW_NS < at <= end for at in self.times]
            assert sum(c for c, is_in in zip(self.costs, inside, strict=True) if is_in) <= TOKENS
        for end in self.counted:
            assert sum(end - WINDOW_NS < at <= end for at in self.counted) <= REQUESTS

    @invariant()
    def nothing_is_lost_and_nothing_counted_twice(self):
        use, now = self.gate.use("acme"), self.clock.now_ns()
        assert use.tokens.total(now) == self.spent(now)
        assert use.requests.total(now) == self.num_counted(now)
        assert use.num_concurrent == len(self.leases)

    def teardown(self):
        """After all requests end, nothing remains reserved."""
        for lease, prompt, _ in self.leases.values():
            lease.end(prompt)
        self.clock.advance(WINDOW_NS + SLOT_NS)
        use, now = self.gate.use("acme"), self.clock.now_ns()
        assert (use.num_concurrent, use.tokens.total(now), use.requests.total(now)) == (0, 0, 0)


TestTenantLimits = TenantLimitsMachine.TestCase
