"""A model's configuration as a load request replaces it.

A base model is loaded once: so what such a configuration can change is how requests reach it, the
batch size and whether there may be several responses. Other fields must be those of Triton's
ModelConfig, and are shown by later requests for the configuration.
"""

import dataclasses
from typing import Any

import msgspec
from google.protobuf import json_format
from tritonclient.grpc import model_config_pb2

from loraplex.core.errors import InvalidRequestError
from loraplex.frontends.kserve.models.triton_model import ModelDeclaration

MAX_BATCH_SIZE = 2**20


def overridden(declaration: ModelDeclaration, config: str) -> ModelDeclaration:
    """The model with a configuration, which is JSON. Raises InvalidRequestError."""
    fields = _fields(declaration.name, config)
    name = fields.get("name", declaration.name)
    if name != declaration.name:
        raise _bad(declaration.name, f"its name is {name!r}")
    max_batch_size = fields.get("max_batch_size", declaration.max_batch_size)
    if not 0 <= max_batch_size <= MAX_BATCH_SIZE:
        raise _bad(
            declaration.name,
            f"max_batch_size is {max_batch_size}; it must be in [0, {MAX_BATCH_SIZE}]",
        )
    policy = fields.get("model_transaction_policy")
    is_decoupled = policy.get("decoupled", False) if policy else declaration.is_decoupled
    known = dict(declaration.config or {})
    return dataclasses.replace(
        declaration,
        max_batch_size=max_batch_size,
        is_decoupled=is_decoupled,
        config={**known, **_shown(fields)} if known else None,
    )


def parse_config(name: str, config: str) -> Any:
    """A model_config_pb2.ModelConfig; unknown fields and wrong types are refused.

    name: of the model. Raises InvalidRequestError.
    """
    try:
        document = msgspec.json.decode(config)
        return json_format.ParseDict(document, model_config_pb2.ModelConfig())
    except (msgspec.DecodeError, json_format.ParseError, RecursionError, UnicodeError) as error:
        raise _bad(name, str(error)[:300]) from None
    except (TypeError, ValueError, AttributeError) as error:
        raise _bad(name, f"it is not a JSON object of that kind ({error})"[:300]) from None


def _fields(name: str, config: str) -> dict[str, Any]:
    message = parse_config(name, config)
    fields: dict[str, Any] = json_format.MessageToDict(message, preserving_proto_field_name=True)
    return fields


def _shown(fields: dict[str, Any]) -> dict[str, Any]:
    """Tensors stay as they are declared: a model of ours cannot get others."""
    return {key: value for key, value in fields.items() if key not in ("input", "output")}


def _bad(name: str, problem: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"failed to load '{name}', failed to poll from model repository: its 'config' must be a "
        f"ModelConfig as JSON: {problem}",
        param="config",
    )
