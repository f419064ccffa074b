"""Tools: the model names a function, this program calls it, and the model gets the result.

    pip install openai
    python examples/tool_calls.py --url http://localhost:8000 --model capitals

The server makes sure that arguments match the schema. Whether a model calls a tool at the right
moment is its own skill: `tool_choice="required"` leaves the shipped tiny model no choice.
"""

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import openai
from openai.types.chat import (
    ChatCompletionFunctionToolParam,
    ChatCompletionMessageFunctionToolCall,
    ChatCompletionMessageParam,
)

MAX_ROUNDS = 5


def temperature(city: str, unit: str) -> dict[str, Any]:
    """Return a measured temperature, which a real program would look up."""
    celsius = {"Paris": 18.0, "Rome": 24.5}[city]
    return {"temperature": celsius if unit == "celsius" else celsius * 9 / 5 + 32, "unit": unit}


FUNCTIONS: Mapping[str, Callable[..., dict[str, Any]]] = {"temperature": temperature}
TOOLS: list[ChatCompletionFunctionToolParam] = [
    {
        "type": "function",
        "function": {
            "name": "temperature",
            "description": "The temperature in a city.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"enum": ["Paris", "Rome"]},
                    "unit": {"enum": ["celsius", "fahrenheit"]},
                },
                "required": ["city", "unit"],
                "additionalProperties": False,
            },
        },
    }
]


def result_of(call: ChatCompletionMessageFunctionToolCall) -> str:
    """Call the function that the model names; an error is a result, which the model reads."""
    try:
        function = FUNCTIONS[call.function.name]
        return json.dumps(function(**json.loads(call.function.arguments)))
    except (KeyError, TypeError, ValueError) as error:
        return json.dumps({"error": f"{type(error).__name__}: {error}"})


def complete(client: openai.OpenAI, model: str, prompt: str) -> str | None:
    """Return the model's text, after all the calls that it wants."""
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": prompt}]
    choice: Literal["required", "auto"] = "required"
    for _ in range(MAX_ROUNDS):
        completion = client.chat.completions.create(
            model=model,
            messages=messages,
            tools=TOOLS,
            tool_choice=choice,
            parallel_tool_calls=False,
            max_tokens=256,
            temperature=0,
        )
        message = completion.choices[0].message
        if not message.tool_calls:
            return message.content
        messages.append(message.model_dump(exclude_none=True))  # type: ignore[arg-type]
        for call in message.tool_calls:
            assert isinstance(call, ChatCompletionMessageFunctionToolCall)
            result = result_of(call)
            print(f"{call.function.name}({call.function.arguments}) = {result}")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        choice = "auto"
    raise RuntimeError(f"the model still calls tools after {MAX_ROUNDS} rounds")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://localhost:8000")
    parser.add_argument("--model", default="capitals")
    args = parser.parse_args(arguments)
    with openai.OpenAI(base_url=f"{args.url}/v1", api_key="none") as client:
        print("text:", complete(client, args.model, "How warm is it in Rome?"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
