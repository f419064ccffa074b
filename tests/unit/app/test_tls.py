"""Certificates: errors in them are reported at the start, by file; renewed ones are used."""

import asyncio
import functools
import logging
import os
import re
import ssl
import subprocess
from pathlib import Path

import pytest

from loraplex.app import tls
from loraplex.app.http_server import serving_http
from loraplex.app.tls import certificates
from loraplex.core.errors import ConfigError
from loraplex.core.server_config import ServerConfig
from loraplex.frontends.kserve.grpc.server import GrpcServer
from loraplex.frontends.kserve.service import TritonService
from loraplex.frontends.telemetry.connections import HttpConnections
from support.echo_service import EchoService
from support.naming import naming


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A function (name) -> (certificate, key) of its own."""
    folder = tmp_path_factory.mktemp("tls")

    @functools.cache
    def make(name, *password):
        certificate, key = folder / f"{name}.crt", folder / f"{name}.key"
        command = ["openssl", "req", "-x509", "-subj", "/CN=localhost"]
        command += ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]  # made at once
        command += ["-keyout", str(key), "-out", str(certificate), *(password or ("-nodes",))]
        subprocess.run(command, check=True, capture_output=True)
        return str(certificate), str(key)

    return make


def files(certificate="", key=""):
    return certificates(ServerConfig(tls_cert=certificate, tls_key=key))


def test_none():
    assert files() is None


def test_a_pair(pair):
    certificate, key = pair("one")
    key_bytes, certificate_bytes = files(certificate, key).pair()
    assert b"PRIVATE KEY" in key_bytes
    assert b"BEGIN CERTIFICATE" in certificate_bytes


def test_half_a_pair(pair):
    certificate, key = pair("half")
    with pytest.raises(ConfigError, match=naming("tls_key", "tls_cert")):
        files(certificate)
    with pytest.raises(ConfigError, match=naming("tls_cert", "tls_key")):
        files("", key)


def test_what_is_not_there_or_fits_not(pair, tmp_path):
    certificate, key = pair("good")
    nowhere = str(tmp_path / "nowhere.pem")
    with pytest.raises(ConfigError, match=naming("tls_cert", nowhere)):
        files(nowhere, key)
    with pytest.raises(ConfigError, match=naming("tls_key", nowhere)):
        files(certificate, nowhere)
    (tmp_path / "text").write_text("no certificate")
    with pytest.raises(ConfigError, match=naming("tls_cert", "text", "tls_key")):
        files(str(tmp_path / "text"), key)
    with pytest.raises(ConfigError, match="KEY_VALUES_MISMATCH"):
        files(certificate, pair("other")[1])


def test_no_password_prompt(pair):
    certificate, key = pair("secret", "-passout", "pass:hidden")
    with pytest.raises(ConfigError, match=naming("tls_key", key)):
        files(certificate, key)


class Secret:
    """A volume of a Kubernetes secret: files are links into a folder that a link names."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.certificate, self.key = str(folder / "tls.crt"), str(folder / "tls.key")
        for name in ("tls.crt", "tls.key"):
            (folder / name).symlink_to(Path("..data") / name)

    def set(self, certificate: str, key: str) -> None:
        content = self._folder / f"..{len(os.listdir(self._folder))}"
        content.mkdir()
        (content / "tls.crt").write_bytes(Path(certificate).read_bytes())
        (content / "tls.key").write_bytes(Path(key).read_bytes())
        link = self._folder / "..data_tmp"
        link.symlink_to(content.name)
        link.rename(self._folder / "..data")


@pytest.fixture
def secret(tmp_path, pair):
    secret = Secret(tmp_path)
    secret.set(*pair("first"))
    return secret


async def shown(port: int) -> str:
    """Return the certificate that a new connection gets."""
    address = ("127.0.0.1", port)
    return await asyncio.to_thread(ssl.get_server_certificate, address, timeout=60)


def pem(path: str) -> str:
    return Path(path).read_text()


async def test_new_connections_get_a_renewed_certificate(secret, pair, monkeypatch):
    monkeypatch.setattr(tls, "LOOK_SECONDS", 0.01)
    found = files(secret.certificate, secret.key)
    first, second = pair("first"), pair("second")

    async def nothing(scope, receive, send) -> None:
        del scope, receive, send

    grpc = GrpcServer(TritonService(EchoService()), "127.0.0.1", 0, tls=found.pair)
    await grpc.start()
    serving = serving_http(nothing, ServerConfig(), 0, HttpConnections(), found)
    async with serving as http_port, found.following():
        ports = (http_port, grpc.port)
        assert [await shown(port) for port in ports] == [pem(first[0])] * 2
        secret.set(*second)
        while found.pair() != (Path(second[1]).read_bytes(), Path(second[0]).read_bytes()):
            await asyncio.sleep(0.01)
        assert [await shown(port) for port in ports] == [pem(second[0])] * 2
    await grpc.stop()


def test_files_that_do_not_belong_together_change_nothing(secret, pair, caplog):
    found = files(secret.certificate, secret.key)
    before = found.pair()
    secret.set(pair("second")[0], pair("third")[1])
    with caplog.at_level(logging.ERROR):
        found.refresh()
        found.refresh()
    assert found.pair() == before
    (message,) = (r.message for r in caplog.records if r.name.startswith("loraplex"))
    assert re.search(naming("tls_cert"), message)
    secret.set(*pair("third"))
    found.refresh()
    assert found.pair()[1] == Path(pair("third")[0]).read_bytes()


def test_files_that_are_gone_change_nothing(secret, caplog):
    found = files(secret.certificate, secret.key)
    before = found.pair()
    os.remove(secret.key)
    found.refresh()
    assert found.pair() == before
    assert "the certificate stays as it was" in caplog.text
