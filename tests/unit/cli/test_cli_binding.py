"""Servers without keys are for their own machine, unless the operator allows others."""

import pytest

from loraplex.cli.binding import refuse_if_open, warn_if_open
from loraplex.core.errors import ConfigError
from loraplex.core.server_config import ServerConfig
from support.naming import naming

KEY = "0123456789abcdef" * 4
OPEN = ["0.0.0.0", "::", "192.168.0.7", "example.org", ""]
OWN = ["127.0.0.1", "127.8.8.8", "::1", "localhost"]


@pytest.mark.parametrize("host", OPEN)
def test_open_and_without_keys(host, caplog):
    with pytest.raises(ConfigError, match=naming("API", "--allow-no-keys")):
        refuse_if_open(ServerConfig(host=host))
    warn_if_open(ServerConfig(host=host), "tritonserver")
    assert "tritonserver's default has it" in caplog.text


@pytest.mark.parametrize("host", OWN)
def test_loopback(host, caplog):
    caplog.set_level("INFO")
    warn_if_open(ServerConfig(host=host), "llgtrt")
    refuse_if_open(ServerConfig(host=host))
    assert not caplog.records


@pytest.mark.parametrize("way", ["file", "variable"])
def test_with_keys(way, caplog, monkeypatch):
    caplog.set_level("INFO")
    if way == "variable":
        monkeypatch.setenv("LORAPLEX_API_KEYS", KEY)
    server = ServerConfig(host="0.0.0.0", api_keys_file="keys.toml" if way == "file" else "")
    refuse_if_open(server)
    warn_if_open(server, "tritonserver")
    assert not caplog.records


def test_on_purpose(caplog):
    refuse_if_open(ServerConfig(host="0.0.0.0", allow_no_keys=True))
    assert "allow_no_keys is set" in caplog.text
