"""Two tenants with keys of their own: each has its own adapter under the same name.

Make the keys, give both tenants the right to manage adapters, and start the server with them:

    loraplex keys create --file keys.toml --tenant acme        # prints the key, once
    loraplex keys create --file keys.toml --tenant umbrella
    # in keys.toml, below [tenants.acme] and [tenants.umbrella]:  manage = ["own-*"]
    loraplex serve MODEL --name capitals --api-keys-file keys.toml --allowed-adapter-roots ADAPTERS

    pip install httpx
    python examples/tenant_keys.py --acme-key-file acme.key --acme-adapter ADAPTERS/chinese \
        --umbrella-key-file umbrella.key --umbrella-adapter ADAPTERS/japanese

Keys are read from files, because other users of the machine can read command lines.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import httpx

NAME = "own-style"
PROMPT = r"アメリカ合衆国の首都はどこですか? \n答え:"
TIMEOUT_SECONDS = 120


class RefusedError(Exception):
    """The server refused a request; the message is the server's."""


class Tenant:
    """One tenant's requests, with its key."""

    def __init__(self, name: str, client: httpx.Client) -> None:
        self.name = name
        self._client = client

    def request(self, method: str, path: str, body: object = None) -> httpx.Response:
        """Send a request. Raises RefusedError."""
        response = self._client.request(method, path, json=body)
        if response.is_error:
            message = response.json()["error"]["message"]
            raise RefusedError(f"{self.name}, {method} {path}: {response.status_code} {message}")
        return response

    def load(self, path: Path) -> None:
        """Load an adapter under NAME. path: a folder on the server's machine."""
        body = {"name": NAME, "source": str(path.resolve()), "replace": True}
        self.request("POST", "/v1/adapters", body)

    def unload(self) -> None:
        """Unload the tenant's own adapter."""
        self.request("DELETE", f"/v1/adapters/{NAME}")

    def adapters(self) -> list[str]:
        """Return the names that this tenant sees."""
        return [one["name"] for one in self.request("GET", "/v1/adapters").json()["data"]]

    def complete(self) -> str:
        """Return a completion by the tenant's own adapter."""
        body = {"model": NAME, "prompt": PROMPT, "max_tokens": 16, "temperature": 0}
        text: str = self.request("POST", "/v1/completions", body).json()["choices"][0]["text"]
        return text.strip()


def client_of(url: str, key_file: Path) -> httpx.Client:
    """Return a client that sends the key in a file."""
    key = key_file.read_text(encoding="utf-8").strip()
    headers = {"authorization": f"Bearer {key}"}
    return httpx.Client(base_url=url, headers=headers, timeout=TIMEOUT_SECONDS)


def show(acme: Tenant, umbrella: Tenant) -> None:
    """Print what each tenant gets and sees: the requests and the names are the same."""
    for tenant in (acme, umbrella):
        print(f"{tenant.name}: {tenant.complete()}")
        print(f"{tenant.name} sees: {', '.join(tenant.adapters())}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://localhost:8000")
    for name in ("acme", "umbrella"):
        parser.add_argument(f"--{name}-key-file", type=Path, required=True)
        parser.add_argument(f"--{name}-adapter", type=Path, required=True)
    args = parser.parse_args(arguments)
    with (
        client_of(args.url, args.acme_key_file) as acme_client,
        client_of(args.url, args.umbrella_key_file) as umbrella_client,
    ):
        acme, umbrella = Tenant("acme", acme_client), Tenant("umbrella", umbrella_client)
        try:
            acme.load(args.acme_adapter)
            umbrella.load(args.umbrella_adapter)
            show(acme, umbrella)
            acme.unload()
            umbrella.unload()
        except RefusedError as error:
            print(error, file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
