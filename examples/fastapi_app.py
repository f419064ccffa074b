"""loraplex as a library in a FastAPI application: no second server, one engine for all requests.

    pip install fastapi loraplex
    python examples/fastapi_app.py MODEL --adapter chinese=path/to/adapter
    curl localhost:8080/completions --json '{"prompt": "What is the capital of France?"}'

`AsyncLLM` computes in other threads: routes await it, and the requests of several clients run in
the same steps. `/stream` sends each piece of the text as it is computed; a client that leaves ends
its request.

    curl -N localhost:8080/stream --json '{"prompt": "What is the capital of France?"}'
"""

import argparse
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Annotated

import fastapi
import uvicorn
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel, Field

from loraplex import AsyncLLM, CapacityError, LoraplexError, RequestError, SamplingParams


class Request(BaseModel):
    """What a client of the application sends."""

    prompt: str
    adapter: str | None = None
    max_tokens: Annotated[int, Field(ge=1, le=256)] = 64


class Response(BaseModel):
    """What it gets."""

    text: str
    adapter: str | None
    num_tokens: int


def create_app(model: str, adapters: Mapping[str, str]) -> fastapi.FastAPI:
    """Return the application; it loads the model when it starts, and stops it at its end."""

    @contextlib.asynccontextmanager
    async def lifespan(app: fastapi.FastAPI) -> AsyncIterator[None]:
        async with AsyncLLM(model, adapters=adapters) as llm:
            app.state.llm = llm
            yield

    app = fastapi.FastAPI(title="Completions", lifespan=lifespan)
    app.add_exception_handler(LoraplexError, error_response)
    app.add_api_route("/completions", complete, methods=["POST"])
    app.add_api_route("/stream", stream, methods=["POST"])
    app.add_api_route("/adapters", adapter_names, methods=["GET"])
    return app


async def complete(request: Request, http_request: fastapi.Request) -> Response:
    """Complete a prompt with the base model or with an adapter."""
    llm: AsyncLLM = http_request.app.state.llm
    sampling = SamplingParams(max_tokens=request.max_tokens, temperature=0.0)
    [result] = await llm.generate(request.prompt, sampling, adapter=request.adapter)
    adapter = result.adapter.name if result.adapter else None
    return Response(text=result.text, adapter=adapter, num_tokens=len(result.token_ids))


async def stream(request: Request, http_request: fastapi.Request) -> StreamingResponse:
    """Complete a prompt; send the text as it is computed."""
    llm: AsyncLLM = http_request.app.state.llm
    sampling = SamplingParams(max_tokens=request.max_tokens, temperature=0.0)
    outputs = llm.stream(request.prompt, sampling, adapter=request.adapter)
    # An error before the first token is a response of its own.
    first = await anext(outputs)

    async def texts() -> AsyncIterator[str]:
        async with contextlib.aclosing(outputs):
            yield first.text
            async for output in outputs:
                yield output.text

    return StreamingResponse(texts(), media_type="text/plain; charset=utf-8")


async def adapter_names(http_request: fastapi.Request) -> list[str]:
    """List the adapters that requests may name."""
    llm: AsyncLLM = http_request.app.state.llm
    return [card.name for card in llm.adapters()]


def error_response(_request: fastapi.Request, error: Exception) -> JSONResponse:
    """Return loraplex's own message: it is written for the person who sent the request."""
    status = 400 if isinstance(error, RequestError) else 500
    if isinstance(error, CapacityError):
        status = 503
    return JSONResponse({"detail": str(error)}, status)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--adapter", action="append", default=[], metavar="NAME=PATH")
    parser.add_argument("--port", type=int, default=8080)
    args = parser.parse_args(arguments)
    adapters = dict(adapter.split("=", 1) for adapter in args.adapter)
    uvicorn.run(create_app(args.model, adapters), port=args.port)


if __name__ == "__main__":
    main()
