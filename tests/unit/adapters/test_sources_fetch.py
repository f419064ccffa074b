"""Files are fetched from a server on loopback whose responses a test chooses."""

import contextlib
import errno
import hashlib
import http.server
import json
import logging
import os
import socket
import ssl
import subprocess
import sys
import threading
import time
import types
from pathlib import Path
from typing import ClassVar
from urllib.parse import urlsplit

import pytest

from loraplex.adapters.seen_files import identities_of
from loraplex.adapters.sources import fetch as sources_fetch
from loraplex.adapters.sources import http as sources_http
from loraplex.adapters.sources.download import RATE_SECONDS, Allowance, write_stream
from loraplex.adapters.sources.fetch import local_path
from loraplex.adapters.sources.policy import SourcePolicy
from loraplex.adapters.sources.remotes import HubRemote
from loraplex.adapters.staging import StagingWorker
from loraplex.core.errors import (
    AdapterLoadError,
    AdapterTooLargeError,
    InvalidAdapterError,
    LoraplexError,
    PermissionDeniedError,
    StorageFullError,
    UnsupportedFeatureError,
)
from loraplex.core.rank_limits import RankLimits
from support.kept_staging import keeping_staging_processes
from support.naming import naming, refused

LOCAL = SourcePolicy(allow_private_addresses=True)
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
ENDS = "tokenizer_config.json"


class Web(http.server.ThreadingHTTPServer):
    """HTTP server whose `pages` are, by path, bytes with an ETag or a function of the handler."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.pages = {}
        self.requests = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, *_):
        """A client that hangs up is what some tests are about."""


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.requests.append((self.path, dict(self.headers)))
        page = self.server.pages.get(self.path.partition("?")[0])
        if callable(page):
            page(self)
        elif page is None:
            self.send_error(404)
        else:
            tag = f'"{hashlib.md5(page).hexdigest()}"'
            if self.headers.get("If-None-Match") == tag:
                self.response(304)
            else:
                self.response(200, page, ETag=tag)

    def response(self, status, body=b"", **headers):
        self.send_response(status)
        for name, value in ({"Content_Length": len(body)} | headers).items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def web():
    server = Web()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def state(tmp_path):
    """The state directory; nothing half may be left in it."""
    yield tmp_path / "state"
    assert list(tmp_path.glob("state/sources/.arriving-*")) == []


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture(autouse=True)
def hurry(monkeypatch):
    monkeypatch.setattr(sources_http, "_FIRST_WAIT_SECONDS", 0.001)
    monkeypatch.setattr(sources_http, "_TIMEOUT_SECONDS", 2.0)


def redirect_to(where):
    return lambda handler: handler.response(302, Location=where)


class TestAFile:
    def test_arrives_once(self, web, state):
        web.pages["/v1.2.safetensors"] = b"weights"
        path = local_path(f"{web.url}/v1.2.safetensors", LOCAL, state)
        assert path.read_bytes() == b"weights"
        before = identities_of([path])
        again = local_path(f"{web.url}/v1.2.safetensors", LOCAL, state)
        # The very file, untouched: what was staged from it is known by these.
        assert (again, identities_of([again])) == (path, before)
        assert "If-None-Match" in web.requests[1][1]

    def test_a_gguf_file_keeps_its_ending(self, web, state):
        web.pages["/My-LoRA-f16.gguf"] = b"GGUF"
        path = local_path(f"{web.url}/My-LoRA-f16.gguf", LOCAL, state)
        assert (path.name, path.read_bytes()) == ("adapter.gguf", b"GGUF")

    def test_changes(self, web, state):
        url = f"{web.url}/zh.safetensors"
        web.pages["/zh.safetensors"] = b"one"
        first = local_path(url, LOCAL, state)
        web.pages["/zh.safetensors"] = b"two"
        second = local_path(url, LOCAL, state)
        assert second.read_bytes() == b"two"
        assert not first.exists()

    def test_dates_serve_as_well(self, web, state):
        date = "Sat, 01 Aug 2026 00:00:00 GMT"

        def page(handler):
            is_known = handler.headers.get("If-Modified-Since") == date
            body = b"" if is_known else b"x"
            handler.response(304 if is_known else 200, body, Last_Modified=date)

        web.pages["/zh.safetensors"] = page
        paths = {local_path(f"{web.url}/zh.safetensors", LOCAL, state) for _ in range(2)}
        assert [path.read_bytes() for path in paths] == [b"x"]
        assert web.requests[1][1]["If-Modified-Since"] == date

    def test_a_damaged_copy_is_fetched_again(self, web, state):
        web.pages["/zh.safetensors"] = b"whole"
        path = local_path(f"{web.url}/zh.safetensors", LOCAL, state)
        path.unlink()
        assert local_path(f"{web.url}/zh.safetensors", LOCAL, state).read_bytes() == b"whole"

    def test_checksums(self, web, state):
        web.pages["/zh.safetensors"] = b"weights"
        right = hashlib.sha256(b"weights").hexdigest()
        url = f"{web.url}/zh.safetensors#sha256="
        for _ in range(2):  # what was kept is checked, too
            with pytest.raises(InvalidAdapterError, match=naming("SHA-256", right, "0" * 64)):
                local_path(f"{url}{'0' * 64}", LOCAL, state)
            assert local_path(f"{url}{right}", LOCAL, state)

    def test_it_is_not_there(self, web, state):
        with refused(InvalidAdapterError, f"{web.url}/none.safetensors", param="path"):
            local_path(f"{web.url}/none.safetensors", LOCAL, state)

    def test_hostile_names_stay_names(self, web, state, tmp_path):
        name = "/%2e%2e/..%2f..%2fetc/pass wd.safetensors".replace(" ", "%20")
        web.pages[name] = b"x"
        path = local_path(web.url + name, LOCAL, state)
        assert path.is_relative_to(state)
        assert [file.name for file in tmp_path.iterdir()] == ["state"]


class TestTooMuch:
    small = SourcePolicy(allow_private_addresses=True, max_bytes=1000)

    def fetch(self, web, state, page):
        web.pages["/zh.safetensors"] = page
        with pytest.raises(AdapterTooLargeError, match=r"than 1000 B.*max_adapter_bytes"):
            local_path(f"{web.url}/zh.safetensors", self.small, state)
        assert len(web.requests) == 1  # and is not tried again
        assert list(state.glob("sources/*/*")) == []

    def test_by_its_header(self, web, state):
        self.fetch(web, state, lambda h: h.response(200, b"", Content_Length=5000))

    def test_in_chunks_without_an_end(self, web, state):
        def page(handler):
            handler.protocol_version = "HTTP/1.1"
            handler.send_response(200)
            handler.send_header("Transfer-Encoding", "chunked")
            handler.end_headers()
            for _ in range(100_000):
                handler.wfile.write(b"64\r\n" + b"x" * 100 + b"\r\n")

        self.fetch(web, state, page)

    def test_without_a_length(self, web, state):
        def page(handler):
            handler.send_response(200)
            handler.end_headers()
            for _ in range(1000):
                handler.wfile.write(b"x" * 100)

        self.fetch(web, state, page)

    def test_more_than_its_length_is_not_read(self, web, state):
        web.pages["/zh.safetensors"] = lambda h: h.response(200, b"x" * 5000, Content_Length=900)
        path = local_path(f"{web.url}/zh.safetensors", self.small, state)
        assert path.stat().st_size == 900

    def test_all_files_together(self, web, state):
        web.pages |= {f"/zh/{CONFIG}": b"c" * 600, f"/zh/{WEIGHTS}": b"w" * 600}
        with pytest.raises(AdapterTooLargeError):
            local_path(f"{web.url}/zh", self.small, state)

    def test_compressed_responses_are_not_taken(self, web, state):
        web.pages["/zh.safetensors"] = lambda h: h.response(200, b"x", Content_Encoding="gzip")
        with pytest.raises(InvalidAdapterError, match=naming("gzip")):
            local_path(f"{web.url}/zh.safetensors", self.small, state)


class TestTrouble:
    def fetch(self, web, state, page, policy=LOCAL):
        web.pages["/zh.safetensors"] = page
        return local_path(f"{web.url}/zh.safetensors?secret=1", policy, state)

    def test_what_passes(self, web, state):
        responses = [
            lambda h: h.response(503, Retry_After=0),
            lambda h: h.response(200, b"half", Content_Length=8),
            lambda h: h.response(429),
            lambda h: h.response(200, b"whole"),
        ]
        path = self.fetch(web, state, lambda h: responses.pop(0)(h))
        assert path.read_bytes() == b"whole"

    @pytest.mark.parametrize(
        ("page", "reason"),  # httpx's text, but for the first
        [
            (lambda h: h.response(502), "responds 502 Bad Gateway"),
            (
                lambda h: h.response(200, b"half", Content_Length=8),
                "without sending complete message body (received 4 bytes, expected 8)",
            ),
            (lambda h: h.wfile.write(b"HTTP/1.1 what\r\n\r\n"), "what"),
            (lambda h: None, "without sending a response"),
        ],
    )
    def test_what_does_not(self, web, state, page, reason):
        with pytest.raises(AdapterLoadError, match=naming(reason, "try again later")) as caught:
            self.fetch(web, state, page)
        assert len(web.requests) == 4
        assert "secret" not in caught.value.message

    def test_a_chunk_that_is_cut(self, web, state):
        def page(handler):
            handler.protocol_version = "HTTP/1.1"
            handler.send_response(200)
            handler.send_header("Transfer-Encoding", "chunked")
            handler.end_headers()
            handler.wfile.write(b"64\r\nabc")
            handler.close_connection = True

        with pytest.raises(AdapterLoadError, match=naming(f"{web.url}/zh.safetensors")):
            self.fetch(web, state, page)

    @pytest.mark.parametrize("status", [400, 401, 403, 500 - 59, 206])
    def test_other_responses_are_final(self, web, state, status):
        with pytest.raises(InvalidAdapterError, match=f"responds {status}"):
            self.fetch(web, state, lambda h: h.response(status))
        assert len(web.requests) == 1

    def test_drop_by_drop(self, web, state):
        def page(handler):
            handler.send_response(200)
            handler.end_headers()
            with contextlib.suppress(OSError):
                for _ in range(100):
                    handler.wfile.write(b"x")
                    time.sleep(0.05)

        policy = SourcePolicy(allow_private_addresses=True, max_seconds=0.3)
        with pytest.raises(AdapterLoadError, match=naming(0.3)):
            self.fetch(web, state, page, policy)

    def test_no_server_listens(self, web, state):
        # The system's text.
        with pytest.raises(AdapterLoadError, match="Connection refused"):
            local_path("http://127.0.0.1:9/zh.safetensors", LOCAL, state)

    def test_for_the_operator_what_was_kept_stands_in(self, web, state, caplog):
        kept = self.fetch(web, state, b"kept")
        with pytest.raises(AdapterLoadError):
            self.fetch(web, state, lambda h: h.response(503))
        path = self.fetch(web, state, lambda h: h.response(503), LOCAL.for_operator())
        assert path == kept
        assert "the copy that arrived before is used" in caplog.text


class TestWhere:
    def test_private_addresses_are_refused_by_default(self, web, state):
        web.pages["/zh.safetensors"] = b"x"
        for policy in (SourcePolicy(), SourcePolicy().for_operator(), SourcePolicy(hosts=("*",))):
            with pytest.raises(PermissionDeniedError, match="allow_private_addresses"):
                local_path(f"{web.url}/zh.safetensors", policy, state)
        assert web.requests == []

    def test_hosts_that_are_not_allowed(self, web, state):
        policy = SourcePolicy(hosts=("example.org",), allow_private_addresses=True)
        with pytest.raises(PermissionDeniedError, match="allowed_adapter_hosts"):
            local_path(f"{web.url}/zh.safetensors", policy, state)
        assert web.requests == []

    def test_redirects(self, web, state):
        web.pages |= {"/zh.safetensors": redirect_to("/b?x=1"), "/b": b"x"}
        assert local_path(f"{web.url}/zh.safetensors", LOCAL, state).read_bytes() == b"x"

    @pytest.mark.parametrize(
        "there",
        ["http://169.254.169.254/latest", "http://[::ffff:169.254.169.254]/", "http://0.0.0.0:1/"],
    )
    def test_a_redirect_to_an_address_that_is_not_public(self, web, state, there):
        web.pages["/zh.safetensors"] = redirect_to(there)
        with refused(PermissionDeniedError, urlsplit(there).hostname, param="path"):
            local_path(f"{web.url}/zh.safetensors", LOCAL, state)

    def test_a_redirect_to_a_host_that_is_not_allowed(self, web, state):
        policy = SourcePolicy(hosts=("127.0.0.1",), allow_private_addresses=True)
        web.pages["/zh.safetensors"] = redirect_to(web.url.replace("127.0.0.1", "localhost"))
        with pytest.raises(PermissionDeniedError, match="localhost"):
            local_path(f"{web.url}/zh.safetensors", policy, state)

    @pytest.mark.parametrize(
        "there", ["file:///etc/passwd", "ftp://h/x?sig=secret", "", "http://["]
    )
    def test_a_redirect_to_no_address(self, web, state, there):
        web.pages["/zh.safetensors"] = redirect_to(there)
        with refused(InvalidAdapterError, f"{web.url}/zh.safetensors", param="path") as caught:
            local_path(f"{web.url}/zh.safetensors", LOCAL, state)
        assert "secret" not in caught.value.message

    def test_redirects_without_end(self, web, state):
        web.pages["/zh.safetensors"] = redirect_to("/zh.safetensors")
        with pytest.raises(InvalidAdapterError, match=naming(5)):
            local_path(f"{web.url}/zh.safetensors", LOCAL, state)

    def test_https_does_not_become_http(self):
        with refused(PermissionDeniedError, "https://h/a", param="path"):
            sources_http._next_url("https://h/a", "http://h/a")


class TestTls:
    @pytest.fixture
    def secure_web(self, web, tmp_path, monkeypatch):
        """The server with a certificate for cats.example.org, which resolves to loopback."""
        certificate, key = tmp_path / "web.crt", tmp_path / "web.key"
        command = ["openssl", "req", "-x509", "-nodes", "-subj", "/CN=cats"]
        command += ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]  # made at once
        command += ["-addext", "subjectAltName=DNS:cats.example.org"]
        command += ["-keyout", str(key), "-out", str(certificate)]
        subprocess.run(command, check=True, capture_output=True)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        web.socket = context.wrap_socket(web.socket, server_side=True)
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", web.server_address)]
        resolve = socket.getaddrinfo
        names = ("cats.example.org", "dogs.example.org")
        monkeypatch.setattr(
            socket,
            "getaddrinfo",
            lambda host, *a, **k: found if host in names else resolve(host, *a, **k),
        )
        return web

    def test_the_certificate_is_that_of_the_name(self, secure_web, state):
        secure_web.pages["/zh.safetensors"] = b"weights"
        port = secure_web.server_address[1]
        url = f"https://cats.example.org:{port}/zh.safetensors"
        assert local_path(url, LOCAL, state).read_bytes() == b"weights"
        assert secure_web.requests[0][1]["Host"] == f"cats.example.org:{port}"

    def test_another_name_is_refused_at_once(self, secure_web, state):
        url = f"https://dogs.example.org:{secure_web.server_address[1]}/zh.safetensors"
        with pytest.raises(InvalidAdapterError, match=naming("dogs.example.org")):
            local_path(url, LOCAL, state)
        assert secure_web.requests == []


class TestProxies:
    def test_a_proxy_gets_the_requests_of_public_hosts(self, web, state, monkeypatch):
        monkeypatch.setenv("http_proxy", web.url.removeprefix("http://"))
        web.pages["http://example.org/zh.safetensors"] = b"weights"
        path = local_path("http://example.org/zh.safetensors", SourcePolicy(), state)
        assert path.read_bytes() == b"weights"
        assert [where for where, _ in web.requests] == ["http://example.org/zh.safetensors"]

    @pytest.mark.parametrize("host", ["localhost", "127.1", "10.0.0.1", "[::1]", "minio"])
    def test_it_gets_none_of_a_private_host(self, web, state, monkeypatch, host):
        monkeypatch.setenv("all_proxy", web.url)
        with refused(PermissionDeniedError, "public", param="path"):
            local_path(f"http://{host}/zh.safetensors", SourcePolicy(), state)
        assert web.requests == []

    def test_a_redirect_through_it_is_checked(self, web, state, monkeypatch):
        monkeypatch.setenv("http_proxy", web.url)
        web.pages["http://example.org/zh.safetensors"] = redirect_to("http://169.254.169.254/x")
        with refused(PermissionDeniedError, "169.254.169.254", param="path"):
            local_path("http://example.org/zh.safetensors", LOCAL, state)

    def test_hosts_beyond_it_are_checked_by_address(self, web, state, monkeypatch):
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        web.pages["/zh.safetensors"] = b"x"
        assert local_path(f"{web.url}/zh.safetensors", LOCAL, state).read_bytes() == b"x"
        with refused(PermissionDeniedError, "127.0.0.1", "allow_private_addresses", param="path"):
            local_path(f"{web.url}/zh.safetensors", SourcePolicy(), state)

    def test_one_that_cannot_be_used(self, state, monkeypatch):
        monkeypatch.setenv("http_proxy", "carrier-pigeon://10.0.0.1")
        with pytest.raises(AdapterLoadError, match=naming("carrier-pigeon://10.0.0.1")):
            local_path("http://example.org/zh.safetensors", SourcePolicy(), state)


class TestAFolder:
    def put(self, web, folder, *, where="/zh", names=(CONFIG, WEIGHTS)):
        for name in names:
            web.pages[f"{where}/{name}"] = (folder / name).read_bytes()

    def test_of_peft(self, web, state, peft_folder):
        folder = peft_folder().write()
        self.put(web, folder)
        path = local_path(f"{web.url}/zh/", LOCAL, state)
        assert {file.name: file.read_bytes() for file in path.iterdir()} == {
            file.name: file.read_bytes() for file in folder.iterdir()
        }

    def test_of_tensorrt_llm(self, web, state, pair, tmp_path):
        names = ("model.lora_weights.npy", "model.lora_keys.npy")
        self.put(web, pair.write(tmp_path / "pair", config_name=names[1]), names=names)
        path = local_path(f"{web.url}/zh", LOCAL, state)
        assert sorted(file.name for file in path.iterdir()) == sorted(names)

    @pytest.mark.parametrize("name", [ENDS, "generation_config.json"])
    def test_files_with_end_tokens(self, web, state, name):
        web.pages |= {f"/zh/{CONFIG}": b"c", f"/zh/{WEIGHTS}": b"w"}
        assert not (local_path(f"{web.url}/zh", LOCAL, state) / name).exists()
        web.pages[f"/zh/{name}"] = b"ends"
        assert (local_path(f"{web.url}/zh", LOCAL, state) / name).read_bytes() == b"ends"

    def test_a_source_that_refuses_what_it_does_not_have(self, web, state, caplog):
        caplog.set_level(logging.INFO)
        web.pages |= {f"/zh/{CONFIG}": b"c", f"/zh/{WEIGHTS}": b"w"}
        web.pages[f"/zh/{ENDS}"] = lambda handler: handler.response(403)
        path = local_path(f"{web.url}/zh", LOCAL, state)
        assert sorted(file.name for file in path.iterdir()) == [CONFIG, WEIGHTS]
        assert f"{ENDS} is left out" in caplog.text

    def test_end_tokens_that_may_come_later_are_waited_for(self, web, state):
        web.pages |= {f"/zh/{CONFIG}": b"c", f"/zh/{WEIGHTS}": b"w"}
        web.pages[f"/zh/{ENDS}"] = lambda handler: handler.response(503)
        with pytest.raises(AdapterLoadError, match="503"):
            local_path(f"{web.url}/zh", LOCAL, state)

    def test_half_of_one(self, web, state):
        web.pages[f"/zh/{CONFIG}"] = b"{}"
        with refused(
            InvalidAdapterError,
            "adapter_model.safetensors",
            "adapter_model.bin",
            "adapters.safetensors",
            param="path",
        ):
            local_path(f"{web.url}/zh", LOCAL, state)

    def test_none(self, web, state):
        with refused(InvalidAdapterError, "model.lora_weights.npy", param="path"):
            local_path(f"{web.url}/zh", LOCAL, state)

    def test_one_file_of_two_changes(self, web, state):
        web.pages |= {f"/zh/{CONFIG}": b"c1", f"/zh/{WEIGHTS}": b"w1"}
        local_path(f"{web.url}/zh", LOCAL, state)
        web.pages[f"/zh/{CONFIG}"] = b"c2"
        path = local_path(f"{web.url}/zh", LOCAL, state)
        assert (path / CONFIG).read_bytes() == b"c2"
        assert (path / WEIGHTS).read_bytes() == b"w1"

    def test_the_checksum_is_of_the_weights(self, web, state):
        web.pages |= {f"/zh/{CONFIG}": b"c1", f"/zh/{WEIGHTS}": b"w1"}
        right = hashlib.sha256(b"w1").hexdigest()
        assert local_path(f"{web.url}/zh#sha256={right}", LOCAL, state)
        with pytest.raises(InvalidAdapterError, match="SHA-256"):
            local_path(f"{web.url}/zh#sha256={hashlib.sha256(b'c1').hexdigest()}", LOCAL, state)

    def test_what_was_used_longest_ago_goes(self, web, state):
        policy = SourcePolicy(allow_private_addresses=True, max_kept_bytes=250)
        paths = []
        for number in range(3):
            web.pages[f"/{number}.safetensors"] = bytes([number]) * 100
            paths.append(local_path(f"{web.url}/{number}.safetensors", policy, state))
            os.utime(paths[-1].parent.parent / "note.json", (number, number))
        assert [path.exists() for path in paths] == [False, True, True]


class TestTheHub:
    commit = "c" * 40

    @pytest.fixture
    def hub(self, web, monkeypatch):
        fake = types.SimpleNamespace(
            constants=types.SimpleNamespace(ENDPOINT=web.url), get_token=lambda: "hf_secret"
        )
        monkeypatch.setitem(sys.modules, "huggingface_hub", fake)
        self.publish(web, self.commit)
        return web

    def publish(self, web, commit, revision="main", folder="", names=(CONFIG, WEIGHTS)):
        files = [{"rfilename": f"{folder}/{name}".removeprefix("/")} for name in names]
        response = json.dumps({"sha": commit, "siblings": files}).encode()
        web.pages[f"/api/models/owner/name/revision/{revision}"] = response
        for name in names:
            body = f"{commit} {name}".encode()
            web.pages[f"/owner/name/resolve/{commit}{folder}/{name}"] = body

    def test_all_files_are_of_one_commit_and_come_once(self, hub, state):
        path = local_path("hf://owner/name", LOCAL, state)
        assert (path / WEIGHTS).read_text() == f"{self.commit} {WEIGHTS}"
        assert all(headers["Authorization"] == "Bearer hf_secret" for _, headers in hub.requests)
        num_requested = len(hub.requests)
        assert local_path("owner/name", LOCAL, state) == path
        assert len(hub.requests) == num_requested + 1
        self.publish(hub, "d" * 40)
        again = local_path("owner/name", LOCAL, state)
        assert (again / CONFIG).read_text().startswith("d" * 40)

    @pytest.mark.parametrize("folder", ["", "/deep/zh"])
    def test_files_with_end_tokens(self, hub, state, folder):
        self.publish(hub, "e" * 40, folder=folder, names=(CONFIG, WEIGHTS, ENDS))
        path = local_path(f"hf://owner/name{folder and '@main'}{folder}", LOCAL, state)
        assert (path / ENDS).read_text() == f"{'e' * 40} {ENDS}"
        assert [path for path, _ in hub.requests if "generation_config" in path] == []

    def test_revisions_and_folders(self, hub, state):
        self.publish(hub, "e" * 40, revision="v1", folder="/deep/zh")
        path = local_path("hf://owner/name@v1/deep/zh", LOCAL, state)
        assert (path / CONFIG).read_text().startswith("e" * 40)

    def test_the_token_does_not_leave_the_hub(self, hub, state):
        other = Web()
        threading.Thread(target=other.serve_forever, args=(0.01,), daemon=True).start()
        other.pages["/blob"] = b"weights"
        target = f"/owner/name/resolve/{self.commit}/{WEIGHTS}"
        hub.pages[target] = redirect_to(f"{other.url}/blob")
        local_path("hf://owner/name", LOCAL, state)
        other.shutdown()
        other.server_close()
        assert [path for path, _ in other.requests] == ["/blob"]
        assert "Authorization" not in other.requests[0][1]

    def test_a_checksum_that_the_hub_sends(self, hub, state):
        hub.pages["/blob"] = b"weights"
        target = f"/owner/name/resolve/{self.commit}/{WEIGHTS}"

        def page(sha256):
            return lambda h: h.response(302, Location="/blob", X_Linked_Etag=f'"{sha256}"')

        hub.pages[target] = page("0" * 64)
        with pytest.raises(
            AdapterLoadError,
            match=naming("0" * 64),
        ):
            local_path("hf://owner/name", LOCAL, state)
        hub.pages[target] = page(hashlib.sha256(b"weights").hexdigest())
        assert local_path("hf://owner/name", LOCAL, state)

    def test_a_repository_that_is_not_there(self, hub, state):
        with refused(InvalidAdapterError, "owner/none", param="path"):
            local_path("hf://owner/none", LOCAL, state)

    def test_an_invalid_response(self, hub, state):
        hub.pages["/api/models/owner/name/revision/main"] = b"<html>"
        with pytest.raises(AdapterLoadError, match="unreadable"):
            local_path("hf://owner/name", LOCAL, state)

    def test_clients_need_the_operators_word(self, hub, state):
        with pytest.raises(PermissionDeniedError, match="allowed_adapter_hosts"):
            local_path("owner/name", SourcePolicy(hosts=()), state)
        assert hub.requests == []

    def test_its_other_hosts_are_allowed_after_a_redirect_only(self, state):
        policy = SourcePolicy(hosts=("hub.example.org",))
        assert HubRemote  # the rule is the client's
        client = sources_http.HttpClient(policy, ("*.hf.co",))
        with (
            pytest.raises(PermissionDeniedError, match=r"cdn\.hf\.co"),
            client._opened("https://cdn.hf.co/x", {}),
        ):
            pass


class TestObjectStores:
    @pytest.fixture
    def bucket(self, monkeypatch):
        """s3:// is in memory here."""
        from fsspec.implementations.memory import MemoryFileSystem

        class Bucket(MemoryFileSystem):
            protocol = ("s3",)
            store: ClassVar = {}
            pseudo_dirs: ClassVar = [""]

            @classmethod
            def _strip_protocol(cls, path):
                return "/" + path.removeprefix("s3://").strip("/")

        monkeypatch.setitem(sys.modules["fsspec.registry"]._registry, "s3", Bucket)
        return Bucket

    def put(self, bucket, path, data):
        files = bucket()
        files.pipe_file(f"s3://ours/{path}", data)

    def test_a_folder(self, bucket, state):
        self.put(bucket, f"zh/{CONFIG}", b"{}")
        self.put(bucket, f"zh/{WEIGHTS}", b"w")
        path = local_path("s3://ours/zh", SourcePolicy(hosts=("s3://ours",)), state)
        assert (path / WEIGHTS).read_bytes() == b"w"

    def test_a_file_and_its_limits(self, bucket, state):
        self.put(bucket, "v1.2.safetensors", b"x" * 100)
        assert local_path("s3://ours/v1.2.safetensors", LOCAL, state).stat().st_size == 100
        with pytest.raises(AdapterTooLargeError):
            local_path("s3://ours/v1.2.safetensors", SourcePolicy(max_bytes=99), state)
        with pytest.raises(PermissionDeniedError, match="s3://ours"):
            local_path("s3://ours/v1.2.safetensors", SourcePolicy(hosts=("s3://o",)), state)
        with refused(
            InvalidAdapterError, "s3://ours/none", "s3://ours/none.safetensors", param="path"
        ):
            local_path("s3://ours/none.safetensors", LOCAL, state)

    @pytest.mark.parametrize(
        ("failure", "error"),
        [
            (PermissionError("denied"), InvalidAdapterError),
            (RuntimeError("no credentials"), AdapterLoadError),
        ],
    )
    def test_failures_of_the_store(self, bucket, state, monkeypatch, failure, error):
        def fail(*_, **__):
            raise failure

        monkeypatch.setattr(bucket, "info", fail)
        with pytest.raises(error, match=str(failure)):
            local_path("s3://ours/zh.safetensors", LOCAL, state)

    def test_a_package_that_is_missing(self, state, monkeypatch):
        import fsspec

        def missing(_):
            raise ImportError("Install s3fs")

        monkeypatch.setattr(fsspec.core, "url_to_fs", missing)
        with refused(UnsupportedFeatureError, "loraplex[remote]", "s3fs", param="path"):
            local_path("s3://ours/zh", LOCAL, state)


class TestSlowHosts:
    def download(self, rate, tmp_path):
        """Write a stream that yields `rate` bytes once a second of a clock that stands else."""
        clock = types.SimpleNamespace(seconds=0.0)

        def chunks():
            for _ in range(100):
                clock.seconds += 1.0
                yield b"x" * rate

        policy = SourcePolicy(min_bytes_per_second=1000)
        allowance = Allowance(policy, "it", lambda: clock.seconds)
        try:
            write_stream(chunks(), tmp_path / "file", allowance, None)
        finally:
            self.seconds = clock.seconds

    def test_ten_bytes_a_second_end_soon(self, tmp_path):
        with pytest.raises(AdapterLoadError, match=naming("10 B/s", "1000 B/s")):
            self.download(10, tmp_path)
        assert self.seconds == RATE_SECONDS

    def test_the_minimum_is_enough(self, tmp_path):
        self.download(1000, tmp_path)

    def test_headers_that_trickle_end_too(self, web, state, monkeypatch):
        monkeypatch.setattr(sources_http, "HEADER_SECONDS", 0.2)
        monkeypatch.setattr(sources_http, "_NUM_TRIES", 2)
        ended = threading.Event()

        def trickle(handler):
            try:
                for _ in range(1000):
                    handler.wfile.write(b"H")
                    time.sleep(0.05)
            except OSError:
                ended.set()

        web.pages["/zh.safetensors"] = trickle
        with pytest.raises(AdapterLoadError, match=naming(f"{web.url}/zh.safetensors")):
            local_path(f"{web.url}/zh.safetensors", LOCAL, state)
        assert ended.wait(60)


def test_a_full_disk_is_an_error_of_its_own_and_not_tried_again():
    allowance = Allowance(SourcePolicy(), "it")
    # The system's text.
    with pytest.raises(StorageFullError, match="No space left on device"):
        write_stream([bytes(1 << 20)], Path("/dev/full"), allowance, None)


def test_files_without_their_note_do_not_stay_on_a_full_disk(web, state, monkeypatch):
    def no_space(path, pieces):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    web.pages["/zh.safetensors"] = b"weights"
    monkeypatch.setattr(sources_fetch, "write_atomically", no_space)
    # The system's text.
    with pytest.raises(StorageFullError, match="No space left"):
        local_path(f"{web.url}/zh.safetensors", LOCAL, state)
    assert not [path for path in state.rglob("*") if path.is_file()]


class TestThroughTheWorker:
    @pytest.fixture(autouse=True)
    def _shared_staging(self):
        with keeping_staging_processes():
            yield

    async def test_it_is_staged_and_known_again(self, web, state, peft_folder, shapes):
        TestAFolder().put(web, peft_folder().write())
        worker = StagingWorker(state, policy=LOCAL)
        staged = await worker.stage(f"{web.url}/zh", shapes=shapes, max_ranks=RankLimits(8))
        assert staged.seconds["fetch"] > 0
        again = await worker.stage(f"{web.url}/zh", shapes=shapes, max_ranks=RankLimits(8))
        await worker.close()
        assert again.was_known
        assert again.source == staged.source

    @pytest.mark.parametrize("is_there", [True, False])
    async def test_no_line_of_the_log_has_the_query_of_a_url(
        self, web, state, peft_folder, shapes, caplog, is_there
    ):
        weights = peft_folder().write() / WEIGHTS
        path = "/zh.safetensors?X-Amz-Signature=secret"
        if is_there:
            web.pages[path.partition("?")[0]] = weights.read_bytes()
        worker = StagingWorker(state, policy=LOCAL)
        with caplog.at_level(logging.DEBUG), contextlib.suppress(LoraplexError):
            await worker.stage(f"{web.url}{path}", shapes=shapes, max_ranks=RankLimits(8))
        await worker.close()
        of_worker = [r for r in caplog.records if r.name.startswith("loraplex.adapters.staging")]
        assert not [r.getMessage() for r in of_worker if "secret" in r.getMessage()]
        assert not [r.getMessage() for r in of_worker if r.levelno >= logging.WARNING]

    async def test_errors_name_the_source_and_not_its_copy(self, web, state, shapes):
        web.pages |= {f"/zh/{CONFIG}": b"{", f"/zh/{WEIGHTS}": b"w1"}
        worker = StagingWorker(state, policy=LOCAL)
        with pytest.raises(InvalidAdapterError) as caught:
            await worker.stage(f"{web.url}/zh", shapes=shapes, max_ranks=RankLimits(8))
        await worker.close()
        assert f"{web.url}/zh/{CONFIG}" in caught.value.message
        assert "state" not in caught.value.message

    async def test_what_clients_name_is_held_to_the_policy(self, web, state, peft_folder, shapes):
        folder = peft_folder().write()
        TestAFolder().put(web, folder)
        policy = SourcePolicy(roots=(), hosts=(), allow_private_addresses=True)
        worker = StagingWorker(state, policy=policy)
        for source in (str(folder), f"{web.url}/zh"):
            with pytest.raises(PermissionDeniedError):
                await worker.stage(source, shapes=shapes, max_ranks=RankLimits(8), is_trusted=False)
            assert await worker.stage(source, shapes=shapes, max_ranks=RankLimits(8))
        await worker.close()

    async def test_a_slow_source_holds_up_no_other(self, web, state, peft_folder, shapes):
        import asyncio

        release = threading.Event()
        web.pages["/zh.safetensors"] = lambda h: release.wait(60) and h.response(404)
        worker = StagingWorker(state, policy=LOCAL)
        slow = asyncio.create_task(
            worker.stage(f"{web.url}/zh.safetensors", shapes=shapes, max_ranks=RankLimits(8))
        )
        assert await worker.stage(
            str(peft_folder().write()), shapes=shapes, max_ranks=RankLimits(8)
        )
        assert not slow.done()
        release.set()
        with pytest.raises(InvalidAdapterError):
            await slow
        await worker.close()


def test_the_fetchers_stay_out_of_serving():
    """Only the staging worker opens what came from elsewhere."""
    folder = Path(sources_http.__file__).parents[2] / "serving"
    for file in folder.glob("*.py"):
        assert "sources.fetch" not in file.read_text(encoding="utf-8"), file
