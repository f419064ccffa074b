"""OpenAI's own client: the base model, an adapter, a stream, and a wrong name.

    pip install openai
    python examples/openai_client.py --url http://localhost:8000 --model capitals --adapter chinese

An adapter is named in `model`, as a fine-tuned model is at OpenAI.
"""

import argparse
import sys
from collections.abc import Sequence

import openai
from openai.types.chat import ChatCompletionMessageParam

MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "美国的首都在哪里?"}]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://localhost:8000")
    parser.add_argument("--model", default="capitals")
    parser.add_argument("--adapter", default="chinese")
    args = parser.parse_args(arguments)

    # A server without keys accepts any key, but the client insists on one.
    with openai.OpenAI(base_url=f"{args.url}/v1", api_key="none") as client:
        print("models:", ", ".join(model.id for model in client.models.list()))

        for model in (args.model, args.adapter):
            completion = client.chat.completions.create(
                model=model, messages=MESSAGES, max_tokens=32, temperature=0
            )
            print(f"{model}: {completion.choices[0].message.content}")

        print(f"{args.adapter}, streamed:", end=" ")
        stream = client.chat.completions.create(
            model=args.adapter, messages=MESSAGES, max_tokens=32, temperature=0, stream=True
        )
        for chunk in stream:
            if chunk.choices:
                print(chunk.choices[0].delta.content or "", end="", flush=True)
        print()

        try:
            client.completions.create(model="no-such-adapter", prompt="Hello", max_tokens=1)
        except openai.NotFoundError as error:
            print("an unknown name:", error.message)
    return 0


if __name__ == "__main__":
    sys.exit(main())
