"""Structured output: a pydantic class, one of a list of texts, and a regular expression.

    pip install openai pydantic
    python examples/structured_outputs.py --url http://localhost:8000 --model capitals

The server lets the model choose only tokens that keep the output valid, so it always parses unless
`max_tokens` cuts it off.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Any, Literal

import openai
import pydantic
from openai.types.chat import ChatCompletionMessageParam

MESSAGES: list[ChatCompletionMessageParam] = [
    {"role": "user", "content": "What is the capital of France?"}
]


class City(pydantic.BaseModel):
    """What is known about a city. Extra fields are forbidden, as OpenAI demands."""

    model_config = pydantic.ConfigDict(extra="forbid")

    name: Literal["Paris", "Rome", "Tokyo"]
    is_capital: bool


def constrained(client: openai.OpenAI, model: str, constraint: dict[str, Any]) -> str | None:
    """Return an output that meets a constraint beyond OpenAI's own, under vLLM's names."""
    completion = client.chat.completions.create(
        model=model,
        messages=MESSAGES,
        max_tokens=32,
        temperature=0,
        extra_body={"structured_outputs": constraint},
    )
    return completion.choices[0].message.content


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://localhost:8000")
    parser.add_argument("--model", default="capitals")
    args = parser.parse_args(arguments)
    with openai.OpenAI(base_url=f"{args.url}/v1", api_key="none") as client:
        try:
            completion = client.chat.completions.parse(
                model=args.model,
                messages=MESSAGES,
                response_format=City,
                max_tokens=64,
                temperature=0,
            )
        except openai.LengthFinishReasonError:
            print("max_tokens is too small for the whole object", file=sys.stderr)
            return 1
        city = completion.choices[0].message.parsed
        assert city is not None  # the model did not refuse
        print(f"schema: {city.name}, capital: {city.is_capital}")
        print("choice:", constrained(client, args.model, {"choice": ["yes", "no"]}))
        print("regex:", constrained(client, args.model, {"regex": r"[0-9]{4}-[0-9]{2}"}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
