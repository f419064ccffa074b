"""Use of adapters: counted by tenant, and bounded."""

from loraplex.serving.adapter_usage import AdapterUsage, UsedAdapter

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
