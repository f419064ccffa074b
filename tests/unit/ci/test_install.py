"""The build of torch that the make targets install."""

import importlib.util
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType

import pytest

_PROGRAM = Path(__file__).parents[3] / ".ci" / "install.py"
INSTALL = ("install", "--quiet", "-c", "constraints.txt", "-e", ".")


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("ci_install", _PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


install = load()


def never(index: str) -> bool:
    raise AssertionError(f"probed {index}")


def test_without_a_card_the_cpu_build_is_taken_and_said():
    probed: list[str] = []
    variables, line = install.torch_backend(INSTALL, {}, False, lambda url: not probed.append(url))
    assert variables == {"UV_TORCH_BACKEND": "cpu"}
    assert "CPU build of torch" in line
    assert "\n" not in line
    assert probed == ["https://download.pytorch.org/whl/cpu"]


def test_without_its_index_the_configured_one_decides():
    variables, line = install.torch_backend(INSTALL, {}, False, lambda url: False)
    assert variables == {}
    assert "does not respond" in line
    assert "\n" not in line


def test_a_card_or_another_command_changes_nothing():
    assert install.torch_backend(INSTALL, {}, True, never) == ({}, "")
    assert install.torch_backend(("compile", "pyproject.toml"), {}, False, never) == ({}, "")


@pytest.mark.parametrize(
    "flag",
    ["--extra-index-url", "--index-url=https://mirror/simple", "--find-links", "--torch-backend"],
)
def test_indexes_of_the_user_win(flag: str):
    assert install.torch_backend((*INSTALL, flag), {}, False, never) == ({}, "")


def test_a_variable_of_the_user_wins():
    chosen = {"UV_TORCH_BACKEND": "cu130"}
    assert install.torch_backend(INSTALL, chosen, False, never) == ({}, "")


def test_a_folder_with_a_cpu_build_needs_no_index(tmp_path: Path):
    settings = {"find-links": f"{tmp_path / 'empty'} {tmp_path}"}
    environment = install.uv_environment(settings)
    assert install.torch_backend(INSTALL, environment, False, lambda url: True)[0] != {}
    (tmp_path / "torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl").touch()
    assert install.torch_backend(INSTALL, environment, False, never) == ({}, "")


def test_an_environment_that_has_torch_keeps_it(tmp_path: Path):
    python = tmp_path / "bin" / "python"
    arguments = (*INSTALL, "--python", str(python))
    assert install.torch_backend(arguments, {}, False, lambda url: True)[0] != {}
    (tmp_path / "lib" / "python3.11" / "site-packages" / "torch").mkdir(parents=True)
    assert install.torch_backend(arguments, {}, False, never) == ({}, "")


class Index(BaseHTTPRequestHandler):
    """Knows torch under /cpu only."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/cpu/torch/" else 403)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def index() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Index) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_reachable_is_an_index_that_knows_torch(index: str):
    assert install.is_reachable(f"{index}/cpu")
    assert not install.is_reachable(f"{index}/refused")
    assert not install.is_reachable("http://127.0.0.1:1/cpu")
    assert not install.is_reachable("nothing")
