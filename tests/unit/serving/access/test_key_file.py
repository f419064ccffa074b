"""The file of tenants and keys: its contents and its errors."""

import pytest

from loraplex.core.errors import ConfigError
from loraplex.core.principal import ALL, NONE, Names, Principal, Rights, TenantLimits
from loraplex.serving.access.key_file import (
    MAX_FILE_BYTES,
    parse_key_file,
    principal_of,
    read_key_file,
)
from support.naming import naming, refused

HASH = "ab" * 32
OTHER_HASH = "cd" * 32
PLAIN = Rights(use=ALL, list=ALL, manage=NONE, models=ALL, operator=False)
WHOLE = f"""
[tenants.acme]
use = ["fr-*", "legal"]
list = "none"
manage = ["own-*"]
models = ["base"]
operator = true
requests_per_minute = 60
tokens_per_minute = 1000
max_concurrent_requests = 4
max_prompt_tokens = 100
max_n = 2
share_weight = 2.5

[tenants.plain]
[tenants.default]

[[keys]]
id = "one"
tenant = "acme"
sha256 = "{HASH}"
created = 2026-01-31T12:00:00Z

[[keys]]
id = "two"
tenant = "plain"
sha256 = "{OTHER_HASH}"

[[revoked]]
id = "two"
"""


def test_a_whole_file():
    file = parse_key_file(WHOLE.encode(), "keys.toml")
    assert file.tenants["acme"] == Principal(
        "acme",
        Rights(
            use=Names(("fr-*", "legal")),
            list=NONE,
            manage=Names(("own-*",)),
            models=Names(("base",)),
            operator=True,
        ),
        TenantLimits(
            requests_per_minute=60,
            tokens_per_minute=1000,
            max_concurrent_requests=4,
            max_prompt_tokens=100,
            max_n=2,
        ),
        2.5,
    )
    assert [key.id for key in file.keys] == ["one", "two"]
    assert [key.id for key in file.valid_keys] == ["one"]


def test_what_is_not_written():
    tenants = parse_key_file(WHOLE.encode(), "keys.toml").tenants
    assert tenants["plain"] == Principal("plain", PLAIN)
    assert tenants["default"] == Principal()
    assert principal_of(tenants, "default") == principal_of({}, "default") == Principal()
    assert principal_of({}, "new") == Principal("new", PLAIN)


def test_an_empty_file_has_no_keys():
    assert parse_key_file(b"", "x").keys == ()


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[", ("TOML", "keys.toml")),
        ("key = 1", ("tenants", "keys", "revoked", "keys.toml")),
        ("tenants = 1", ("keys.toml", "tenants.NAME")),
        ("keys = 1", ("keys.toml",)),
        ("[tenants.'a b']", (128, "keys.toml", "a b")),
        ("[tenants.a]\nuse = 'some'", ("tenants.a.use", "all", "none", "keys.toml", "some")),
        ("[tenants.a]\nusing = 'all'", ("using", "keys.toml", "tenants.a")),
        ("[tenants.a]\nlist = [1]", ("$.list", "keys.toml", "tenants.a")),
        ("[tenants.a]\noperator = 'yes'", ("keys.toml", "tenants.a", "$.operator")),
        (
            "[tenants.a]\nrequests_per_minute = 0",
            ("tenants.a.requests_per_minute", 1, 0, "keys.toml"),
        ),
        ("[tenants.a]\nmax_n = -1", ("tenants.a.max_n", 1, "keys.toml", -1)),
        (
            "[tenants.a]\nshare_weight = 0",
            ("tenants.a.share_weight", 0.001, 1000, 0.0, "keys.toml"),
        ),
        (
            "[tenants.a]\nshare_weight = 1e-200",
            ("tenants.a.share_weight", 0.001, 1000, "keys.toml", "1e-200"),
        ),
        (
            "[tenants.a]\nshare_weight = 1000.5",
            ("tenants.a.share_weight", 0.001, 1000, "keys.toml", 1000.5),
        ),
        ("[tenants.a]\nshare_weight = inf", ("tenants.a.share_weight", 0.001, 1000, "keys.toml")),
        ("[tenants.a]\nshare_weight = nan", ("tenants.a.share_weight", 0.001, 1000, "keys.toml")),
        (f"[[keys]]\nid = 'x'\ntenant = 'a'\nsha256 = '{HASH}'", ("tenants.a", "keys.toml", "x")),
        ("[tenants.a]\n[[keys]]\nid = 'x'\ntenant = 'a'\nsha256 = 'AB'", (64, "keys.toml", "x")),
        ("[tenants.a]\n[[keys]]\nid = 'x'\ntenant = 'a'", ("sha256", "keys.toml", "keys[0]")),
        (
            f"[tenants.a]\n[[keys]]\nid = 'x'\ntenant = 'a'\nsha256 = '{HASH}'\n"
            f"[[keys]]\nid = 'y'\ntenant = 'a'\nsha256 = '{HASH}'",
            ("y", "keys.toml"),
        ),
        (
            f"[tenants.a]\n[[keys]]\nid = 'x'\ntenant = 'a'\nsha256 = '{HASH}'\n"
            f"[[keys]]\nid = 'x'\ntenant = 'a'\nsha256 = '{'00' * 32}'",
            ("x", "keys.toml"),
        ),
    ],
)
def test_errors_are_reported_with_their_location(text, named):
    with pytest.raises(ConfigError, match=naming(*named)) as raised:
        parse_key_file(text.encode(), "keys.toml")
    assert raised.value.message.startswith("keys.toml")


def test_the_servers_own_tenant_may_be_no_operator():
    tenants = parse_key_file(b"[tenants.default]\noperator = false", "x").tenants
    assert tenants["default"].rights == Rights(operator=False)


def test_sizes_are_limited(monkeypatch, tmp_path):
    path = tmp_path / "keys.toml"
    path.write_bytes(b"#" * MAX_FILE_BYTES)
    assert read_key_file(path).keys == ()
    path.write_bytes(b"#" * (MAX_FILE_BYTES + 1))
    with refused(ConfigError, "16 MiB"):
        read_key_file(path)
    monkeypatch.setattr("loraplex.serving.access.key_file.MAX_KEYS", 2)
    assert len(parse_key_file(WHOLE.encode(), "x").keys) == 2
    monkeypatch.setattr("loraplex.serving.access.key_file.MAX_KEYS", 1)
    with refused(ConfigError, "x", 2, 1):
        parse_key_file(WHOLE.encode(), "x")


def test_a_file_that_is_not_there(tmp_path):
    with refused(ConfigError, tmp_path / "nowhere"):
        read_key_file(tmp_path / "nowhere")
