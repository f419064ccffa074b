"""The dialect of the OpenAI routes, and its preparations at the start."""

import logging
from contextlib import aclosing

from loraplex.core.config import Config
from loraplex.core.errors import ConfigError, InvalidRequestError
from loraplex.core.principal import LOCAL
from loraplex.core.request import GenerateRequest
from loraplex.core.sampling_params import SamplingParams
from loraplex.core.task import Generate
from loraplex.frontends.openai.context import OPENAI, ApiDialect
from loraplex.frontends.openai.llgtrt import CompatDialect, LlgtrtDialect
from loraplex.frontends.streams import generate_all
from loraplex.serving.backend import Backend

logger = logging.getLogger(__name__)

_WARM_UP_PROMPT = "Hi"
_WARM_UP_TOKENS = 10


def dialect_of(config: Config) -> ApiDialect:
    if config.server.dialect == "openai":
        return OPENAI
    models = list(config.models.values())
    kind = CompatDialect if config.server.dialect == "llgtrt_compat" else LlgtrtDialect
    return kind(
        has_lora_root=any(model.lora_root for model in models),
        json_start_token=next((m.json_start_token for m in models if m.json_start_token), ""),
    )


def check_start_tokens(backend: Backend, config: Config) -> None:
    """Raise ConfigError for a json_start_token that is not a special token: no engine needs to
    run for this."""
    for name, model in config.models.items():
        if model.json_start_token:
            _check_start_token(backend, name, model.json_start_token)


async def prepare(backend: Backend, config: Config) -> None:
    """Do what llgtrt does once its models are loaded, before it reports that it is ready.

    Raises the errors of the first generation.
    """
    if config.server.dialect == "openai":
        return
    for name in config.models:
        await _try_template(backend, name)
        await _warm_up(backend, name)


def _check_start_token(backend: Backend, model: str, token: str) -> None:
    ids = backend.model(model).tokenize(token, add_special_tokens=False)
    if len(ids) != 1 or backend.model(model).detokenize(ids) != "":
        raise ConfigError(
            f"json_start_token {token!r} must be one special token of the tokenizer of {model!r}"
        )


async def _try_template(backend: Backend, model: str) -> None:
    """Log a fault of the chat template at the start; completions are served in any case."""
    try:
        await backend.model(model).chats.render(
            [{"role": "user", "content": "Hello"}], omits_absent=True
        )
    except InvalidRequestError as error:
        logger.warning("model %s: chats will be refused: %s", model, error.message)


async def _warm_up(backend: Backend, model: str) -> None:
    request = GenerateRequest(
        request_id=backend.new_request_id(),
        model=model,
        prompt=_WARM_UP_PROMPT,
        task=Generate(SamplingParams(max_tokens=_WARM_UP_TOKENS, ignore_eos=True)),
    )
    async with aclosing(generate_all(backend, (request,), LOCAL)) as outputs:
        async for _, output in outputs:
            if output.finished:
                logger.info("model %s has written its first %d tokens", model, _WARM_UP_TOKENS)
