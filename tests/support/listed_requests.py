"""Requests for the console to list."""

import json
import urllib.error
import urllib.request
from typing import Any

from loraplex.testing.running_server import MODEL, RunningServer


def complete(
    server: RunningServer,
    *,
    model: str = MODEL,
    key: str = "",
    agent: str = "the test",
    **fields: Any,
) -> int:
    """Send a completion and return its status; a refused one is no error."""
    body = {"model": model, "prompt": "Hello", "max_tokens": 4, "temperature": 0} | fields
    headers = {"content-type": "application/json", "user-agent": agent}
    if key:
        headers["authorization"] = f"Bearer {key}"
    request = urllib.request.Request(
        f"{server.url}/v1/completions", json.dumps(body).encode(), headers
    )
    try:
        with urllib.request.urlopen(request) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def rows(page: Any) -> Any:
    """Return the rows of the screen Requests."""
    return page.locator(".requests > li")
