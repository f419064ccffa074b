"""One real server, asked by the real clients: what a user sees."""

import asyncio

import numpy as np
import openai
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http

from loraplex.testing.capitals.corpus import COUNTRIES, answer, question

pytestmark = pytest.mark.xdist_group("server")

LANGUAGES = {"capitals": "english", "chinese": "chinese", "japanese": "japanese"}
"""Model field of a request to the language that it answers in."""


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client
