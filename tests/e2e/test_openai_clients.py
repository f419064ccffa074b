"""The official clients of OpenAI, LangChain and guidance against a real server: what they need of a
model, that is output which matches a schema, a grammar or a regular expression.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import openai
import pydantic
import pytest

# Its import takes longer than most tests, and each process reads this file.
if TYPE_CHECKING:
    from langchain_openai import ChatOpenAI

pytestmark = pytest.mark.xdist_group("server")

PROMPT = "What is the capital of France?"
MESSAGES = [{"role": "user", "content": PROMPT}]
CLIENTS = Path(sys.prefix) / "clients"
"""Folder of the packages that `make .venv/clients` installs apart from loraplex."""
PROGRAM = Path(__file__).parent / "guidance_program.py"


class City(pydantic.BaseModel):
    """A capital."""

    model_config = pydantic.ConfigDict(extra="forbid")

    name: Literal["Paris", "Rome"]
    is_capital: bool


@pytest.fixture
def client(server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def chat_openai(server, **fields) -> "ChatOpenAI":
    from langchain_openai import ChatOpenAI

    fields = {"model": "capitals", "temperature": 0, "max_tokens": 60} | fields
    return ChatOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, **fields)


def test_parse_gives_a_pydantic_object(client):
    completion = client.chat.completions.parse(
        model="capitals", messages=MESSAGES, response_format=City, max_tokens=60, temperature=0
    )
    message = completion.choices[0].message
    assert isinstance(message.parsed, City)
    assert json.loads(message.content) == message.parsed.model_dump()


def test_a_stream_of_a_pydantic_object(client):
    with client.chat.completions.stream(
        model="capitals", messages=MESSAGES, response_format=City, max_tokens=60, temperature=0
    ) as stream:
        kinds = {event.type for event in stream}
        completion = stream.get_final_completion()
    assert isinstance(completion.choices[0].message.parsed, City)
    assert {"content.delta", "content.done"} <= kinds


async def test_parse_asynchronously_and_what_length_does(server):
    async with openai.AsyncOpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0
    ) as client:
        with pytest.raises(openai.LengthFinishReasonError):
            await client.chat.completions.parse(
                model="capitals", messages=MESSAGES, response_format=City, max_tokens=3
            )


@pytest.mark.parametrize(
    ("schema", "kind"), [(City, City), (City.model_json_schema(), dict)], ids=["class", "schema"]
)
def test_langchain_gives_structured_output(server, schema, kind):
    model = chat_openai(server).with_structured_output(schema, method="json_schema")
    assert isinstance(model.invoke(PROMPT), kind)


def test_langchain_calls_a_tool(server):
    model = chat_openai(server, max_tokens=200).bind_tools([City], tool_choice="City")
    [call] = model.invoke(PROMPT).tool_calls
    assert call["name"] == "City"
    assert isinstance(City(**call["args"]), City)


def test_a_chat_goes_on_with_the_last_message(client):
    beginning = "What is the capital of"
    response = client.chat.completions.create(
        model="capitals",
        messages=[{"role": "user", "content": beginning}],
        max_tokens=8,
        temperature=0,
        extra_body={"continue_final_message": True, "echo": True, "return_prompt_text": True},
    )
    assert response.model_extra["prompt_text"].endswith(beginning)
    assert response.choices[0].message.content.startswith(beginning)
    assert response.choices[0].message.role == "user"


def test_a_cache_salt_shares_no_prompt(client):
    def num_cached(**salt: str) -> int:
        usage = client.completions.create(
            model="capitals", prompt="a b c d " * 20, max_tokens=1, extra_body=salt
        ).usage
        return usage.prompt_tokens_details.cached_tokens

    num_cached()
    assert num_cached() > 0
    assert num_cached(cache_salt="mine") == 0
    assert num_cached(cache_salt="mine") > 0
    assert num_cached(cache_salt="theirs") == 0


@pytest.mark.slow
def test_guidance_selects_and_generates(server):
    if not CLIENTS.is_dir():
        pytest.skip("`make .venv/clients` installs the client of guidance")
    run = subprocess.run(
        [sys.executable, str(PROGRAM), f"{server.url}/v1", "capitals"],
        env={**os.environ, "PYTHONPATH": str(CLIENTS)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    captured = json.loads(run.stdout.splitlines()[-1])
    assert captured["city"] in ("Paris", "Rome")
    assert len(captured["number"]) == 3
    assert json.loads(captured["object"]) in ({"a": 1}, {"a": 2})
