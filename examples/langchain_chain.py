"""LangChain: one prompt template for the base model and an adapter, alone, streamed and in a batch.

pip install langchain-openai
python examples/langchain_chain.py --url http://localhost:8000 --adapter chinese
"""

import argparse
import sys
from collections.abc import Sequence

from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable
from langchain_openai import ChatOpenAI
from pydantic import SecretStr

TEMPLATE = ChatPromptTemplate.from_messages([("user", "{country}的首都在哪里?")])
COUNTRIES = ("美国", "法国", "日本")


def chain(url: str, model: str) -> Runnable[dict[str, str], str]:
    """Return the steps from the values of the template to a text."""
    chat = ChatOpenAI(
        base_url=f"{url}/v1",
        api_key=SecretStr("none"),
        model=model,
        temperature=0,
        max_completion_tokens=32,
    )
    return TEMPLATE | chat | StrOutputParser()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://localhost:8000")
    parser.add_argument("--model", default="capitals")
    parser.add_argument("--adapter", default="chinese")
    args = parser.parse_args(arguments)

    base, adapted = chain(args.url, args.model), chain(args.url, args.adapter)
    print(f"{args.model}:", base.invoke({"country": COUNTRIES[0]}))
    print(f"{args.adapter}, streamed:", end=" ")
    for text in adapted.stream({"country": COUNTRIES[0]}):
        print(text, end="", flush=True)
    print()
    # These requests are in flight together, so the server computes them in the same steps.
    texts = adapted.batch([{"country": country} for country in COUNTRIES])
    for country, text in zip(COUNTRIES, texts, strict=True):
        print(f"{args.adapter}, {country}: {text}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
