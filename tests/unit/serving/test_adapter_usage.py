"""Use of adapters: counted by tenant, and bounded."""

from loraplex.serving.adapter_usage import (
    MAX_IN_MINUTE,
    NUM_MINUTES,
    AdapterUsage,
    UsedAdapter,
)

ZH, JA, FR = (UsedAdapter("base", "default", name) for name in ("zh", "ja", "fr"))


class Seconds:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_tenants_are_counted_apart():
    seconds = Seconds()
    usage = AdapterUsage(seconds)
    usage.count("acme", [ZH], num_prompt_tokens=3, num_output_tokens=4)
    seconds.now = 107.5
    usage.count("acme", [ZH, JA], num_prompt_tokens=1, is_error=True)
    usage.count("other", [ZH])
    zh, ja = usage.of_tenant("acme")[ZH], usage.of_tenant("acme")[JA]
    assert (zh.requests, zh.errors, zh.prompt_tokens, zh.output_tokens) == (2, 1, 4, 4)
    assert (ja.requests, ja.errors, ja.last_used) == (1, 1, 107)
    assert set(usage.of_tenant("other")) == {ZH}
    assert usage.of_tenant("third") == {}
    assert usage.of_server()[ZH].requests == 3
    assert usage.tenants == ["acme", "other"]
    assert usage.since == 100


def test_the_least_recently_used_adapters_are_counted_together():
    usage = AdapterUsage(max_adapters=2, max_server_adapters=3)
    for adapter in (ZH, JA, ZH, FR):
        usage.count("acme", [adapter], num_output_tokens=5)
    assert set(usage.of_tenant("acme")) == {ZH, FR}
    assert usage.others_of("acme").requests == 1
    assert usage.others_of("acme").output_tokens == 5
    assert usage.others_of("other").requests == 0
    assert set(usage.of_server()) == {ZH, JA, FR}
    usage.count("other", [UsedAdapter("base")])
    assert set(usage.of_server()) == {ZH, FR, UsedAdapter("base")}
    assert usage.of_tenant("acme").keys() == {ZH, FR}, "another tenant's use removes nothing"


def requests_of(usage, tenants=("acme",), adapter=ZH):
    """Minutes with requests: (begin, requests)."""
    series = usage.minutes(tenants, lambda used: used == adapter)
    assert len(series) == NUM_MINUTES
    assert [one.t for one in series] == list(range(series[0].t, series[-1].t + 1, 60))
    return [(one.t, one.requests) for one in series if one.requests]


def test_the_last_hour_by_minute():
    seconds = Seconds()
    usage = AdapterUsage(seconds)
    assert requests_of(usage) == []
    usage.count("acme", [ZH, JA], num_prompt_tokens=3, num_output_tokens=4)
    usage.count("acme", [ZH], num_prompt_tokens=1, is_error=True)
    usage.count("other", [ZH])
    seconds.now = 125.0
    usage.count("acme", [ZH])
    assert requests_of(usage) == [(60, 2), (120, 1)]
    assert requests_of(usage, ("acme", "other")) == [(60, 3), (120, 1)]
    assert requests_of(usage, adapter=JA) == [(60, 1)]
    first = next(one for one in usage.minutes(["acme"], ZH.__eq__) if one.t == 60)
    assert (first.errors, first.prompt_tokens, first.output_tokens) == (1, 4, 4)
    seconds.now = 60.0 + 60 * 60
    assert requests_of(usage) == [(120, 1)], "60 minutes with the present one"
    seconds.now += 60
    assert requests_of(usage) == []


def test_a_minute_is_bounded_and_follows_no_clock_that_goes_back():
    seconds = Seconds()
    usage = AdapterUsage(seconds, max_adapters=1, max_server_adapters=1)
    for number in range(MAX_IN_MINUTE + 5):
        usage.count("acme", [UsedAdapter("base", "acme", str(number))])
    usage.count("acme", [UsedAdapter("base", "acme", "0")])
    assert sum(one.requests for one in usage.minutes(["acme"], lambda _: True)) == MAX_IN_MINUTE + 1
    seconds.now = 10.0
    usage.count("acme", [UsedAdapter("base", "acme", "0")])
    assert requests_of(usage, adapter=UsedAdapter("base", "acme", "0")) == [(60, 3)]
