"""Certificates: errors in them are reported at the start, by file."""

import subprocess

import pytest

from loraplex.app.tls import tls_files
from loraplex.core.errors import ConfigError
from loraplex.core.server_config import ServerConfig


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A function (name) -> (certificate, key) of its own."""
    folder = tmp_path_factory.mktemp("tls")

    def make(name, *password):
        certificate, key = folder / f"{name}.crt", folder / f"{name}.key"
        command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-subj", "/CN=localhost"]
        command += ["-keyout", str(key), "-out", str(certificate), *(password or ("-nodes",))]
        subprocess.run(command, check=True, capture_output=True)
        return str(certificate), str(key)

    return make


def files(certificate="", key=""):
    return tls_files(ServerConfig(tls_cert=certificate, tls_key=key))


def test_none():
    assert files() is None


def test_a_pair(pair):
    certificate, key = pair("one")
    key_bytes, certificate_bytes = files(certificate, key).read()
    assert b"PRIVATE KEY" in key_bytes
    assert b"BEGIN CERTIFICATE" in certificate_bytes


def test_half_a_pair(pair):
    certificate, key = pair("half")
    with pytest.raises(ConfigError, match="tls_key is missing"):
        files(certificate)
    with pytest.raises(ConfigError, match="tls_cert is missing"):
        files("", key)


def test_what_is_not_there_or_fits_not(pair, tmp_path):
    certificate, key = pair("good")
    nowhere = str(tmp_path / "nowhere.pem")
    with pytest.raises(ConfigError, match=f"cannot read tls_cert {nowhere}: No such file"):
        files(nowhere, key)
    with pytest.raises(ConfigError, match=f"cannot read tls_key {nowhere}: No such file"):
        files(certificate, nowhere)
    (tmp_path / "text").write_text("no certificate")
    with pytest.raises(ConfigError, match=r"tls_cert .*text .* are no certificate and its key"):
        files(str(tmp_path / "text"), key)
    with pytest.raises(ConfigError, match="KEY_VALUES_MISMATCH"):
        files(certificate, pair("other")[1])


def test_no_password_prompt(pair):
    certificate, key = pair("secret", "-passout", "pass:hidden")
    with pytest.raises(ConfigError, match=f"tls_key {key} is encrypted"):
        files(certificate, key)
