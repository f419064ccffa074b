"""Principals that are read from request headers."""

import pytest

from loraplex.core.errors import UnauthenticatedError
from loraplex.core.principal import LOCAL
from loraplex.frontends.access import (
    by_api_key,
    everyone_is_local,
    headers_of,
    principal_of,
)
from loraplex.serving.access.api_key_ring import ApiKeys
from support.naming import naming

KEY = "lpx_0123456789abcdefghijklmnopqrstuvwxyzABCDEFG"


def test_without_keys_everyone_is_local():
    assert everyone_is_local({}) is LOCAL


@pytest.mark.parametrize("value", [f"Bearer {KEY}", f"bearer  {KEY} "])
def test_a_key(value):
    authenticate = by_api_key(ApiKeys(None, f"acme:{KEY}"))
    assert authenticate({"authorization": value}).tenant == "acme"


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (None, ("Authorization: Bearer KEY",)),
        ("", ("Authorization: Bearer KEY",)),
        ("Bearer", ("Authorization: Bearer KEY",)),
        (f"Basic {KEY}", ("Authorization: Bearer KEY",)),
        (KEY, ("Authorization: Bearer KEY",)),
        (f"Bearer {KEY}x", ("know", "API key")),
        ("Bearer \udcff\u20ac", ("know", "API key")),
    ],
)
def test_no_key_or_a_wrong_one(value, named):
    authenticate = by_api_key(ApiKeys(None, f"acme:{KEY}"))
    with pytest.raises(UnauthenticatedError, match=naming(*named)) as raised:
        authenticate({} if value is None else {"authorization": value})
    assert KEY not in raised.value.message


class TestHeaders:
    def test_by_lower_case_name_and_the_first_of_several(self):
        raw = [(b"x-a", b"1"), (b"x-b", b"\xe9"), (b"x-a", b"2")]
        headers = headers_of({"type": "http", "headers": raw})
        assert dict(headers) == {"x-a": "1", "x-b": "é"}

    def test_they_are_read_once(self):
        scope = {"type": "http", "headers": [(b"x-a", b"1")]}
        assert headers_of(scope) is headers_of(scope)


class TestPrincipalOfARequest:
    def test_it_is_found_once(self):
        keys = ApiKeys(None, f"acme:{KEY}")
        scope = {"type": "http", "headers": [(b"authorization", f"Bearer {KEY}".encode())]}
        found = principal_of(scope, by_api_key(keys))
        assert found.tenant == "acme"

        def never(_headers):
            raise AssertionError

        assert principal_of(scope, never) is found

    def test_a_refused_one_is_not_kept(self):
        scope = {"type": "http", "headers": []}
        for _ in range(2):
            with pytest.raises(UnauthenticatedError):
                principal_of(scope, by_api_key(ApiKeys(None, f"acme:{KEY}")))
