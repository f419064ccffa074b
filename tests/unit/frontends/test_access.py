"""Principals that are read from request headers."""

import pytest

from loraplex.core.errors import UnauthenticatedError
from loraplex.core.principal import LOCAL
from loraplex.frontends.access import by_api_key, everyone_is_local
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
