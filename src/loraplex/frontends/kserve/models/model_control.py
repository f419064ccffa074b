"""Which models of the repository are loaded, and with what changes.

A base model is started with the first model that needs it and stays in memory: to unload a model
takes its name from clients, to load it gives the name back. Who may do so, and the first words of
the errors, are Triton's: only a server under explicit model control lets its clients.

A base model is loaded once: so what the configuration of a load can change is how requests reach
it, the batch size and whether there may be several responses. Its other fields must be those of
Triton's ModelConfig, and are shown by later requests for the configuration.
"""

import dataclasses
import enum
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import msgspec
from google.protobuf import json_format
from tritonclient.grpc import model_config_pb2

from loraplex.core.config import ModelConfig
from loraplex.core.errors import InvalidRequestError, NotReadyError, UnsupportedFeatureError
from loraplex.frontends.kserve.models.triton_model import ModelDeclaration

NOT_EXPLICIT = "explicit model load / unload is not allowed if polling is enabled"
MAX_CONFIG_BYTES = 1024 * 1024
MAX_FILES = 64


class ControlMode(enum.Enum):
    NONE = "none"
    """Every model is loaded at the start."""
    POLL = "poll"
    """Same as NONE: the repository is read once."""
    EXPLICIT = "explicit"


Reload = Callable[[ModelDeclaration, str | None, Mapping[str, bytes]], ModelDeclaration]
"""(model at the start, its configuration as JSON, files by path) -> what it is from now on; None:
the configuration of its folder. Raises errors of core.errors, and then the model stays as it was.
"""


@dataclasses.dataclass(frozen=True, slots=True)
class FoundModel:
    """A model of the repository whose base model has not been started."""

    declarations: tuple[ModelDeclaration, ...]
    """It, and all others of its base model."""
    settings: ModelConfig
    """Those of its base model."""


Discover = Callable[[str], FoundModel]
"""Name of a model -> what the repository has under it now. Raises InvalidRequestError, and
NotFoundError if the repository has no such model."""

Parts = Callable[[ModelDeclaration], Iterable[ModelDeclaration]]
"""A model as it is from now on -> the models that it is made of, as they were at the start."""


class ModelControl:
    def __init__(
        self,
        mode: ControlMode = ControlMode.NONE,
        *,
        loaded: Collection[str] | None = None,
        reload: Reload | None = None,
        discover: Discover | None = None,
    ) -> None:
        """loaded: names that are there at the start; None: all. reload: reads a model's folder
        again; discover: reads the repository for a model whose base model does not run; None:
        there is no repository."""
        self.discover = discover
        self.mode = mode
        self.revision = 0
        """Changes whenever a model is loaded or unloaded."""
        self._loaded = None if loaded is None else set(loaded)
        self._unloaded: set[str] = set()
        self._changed: dict[str, ModelDeclaration | None] = {}
        self._reload = reload

    def is_loaded(self, name: str) -> bool:
        return name not in self._unloaded and (self._loaded is None or name in self._loaded)

    def was_unloaded(self, name: str) -> bool:
        """False for a model that was never there."""
        return name in self._unloaded

    def changed(self, name: str) -> ModelDeclaration | None:
        """What a load has made of a model; None: it is as it was at the start."""
        return self._changed.get(name)

    def read(
        self, declaration: ModelDeclaration, parameters: Mapping[str, object], parts: Parts
    ) -> dict[str, ModelDeclaration | None]:
        """Return what a load makes of a model, with the configuration that is sent along, and of
        its parts: Triton cannot run an ensemble without them. Loaded parts stay as they are.

        declaration: the model as it was at the start. Raises InvalidRequestError,
        UnsupportedFeatureError.
        """
        config, files = _load_parameters(parameters)
        changed = self._read(declaration, config, files)
        read = {declaration.name: changed}
        for part in parts(changed or declaration):
            if not self.is_loaded(part.name):
                read[part.name] = self._read(part, None, {})
        return read

    def load(self, read: Mapping[str, ModelDeclaration | None]) -> None:
        """Give models their names, as they were read."""
        self._changed.update(read)
        self._unloaded.difference_update(read)
        if self._loaded is not None:
            self._loaded.update(read)
        self.revision += 1

    def _read(
        self, declaration: ModelDeclaration, config: str | None, files: Mapping[str, bytes]
    ) -> ModelDeclaration | None:
        """What a load makes of a model; None: it is as it was at the start."""
        if self._reload is not None:
            return self._reload(declaration, config, files)
        if config is None:
            return None
        if files:
            raise UnsupportedFeatureError(
                f"failed to load '{declaration.name}': files of a model cannot be replaced while "
                "the server runs; send 'config' alone"
            )
        return overridden(declaration, config)

    def unload(self, names: Collection[str]) -> None:
        """Unload models; in-flight requests finish. Raises NotReadyError as load does."""
        self.check_explicit()
        self._unloaded.update(names)
        self.revision += 1

    def check_explicit(self) -> None:
        """Raise NotReadyError unless clients may load and unload."""
        if self.mode is not ControlMode.EXPLICIT:
            raise NotReadyError(f"{NOT_EXPLICIT}; start it with --model-control-mode=explicit")


def unloads_dependents(parameters: Mapping[str, object]) -> bool:
    """Whether an unload request includes the dependents."""
    value = parameters.get("unload_dependents", False)
    if not isinstance(value, bool):
        raise InvalidRequestError(
            "invalid value type for unload parameter 'unload_dependents', expected bool_param.",
            param="unload_dependents",
        )
    return value


def _load_parameters(parameters: Mapping[str, object]) -> tuple[str | None, dict[str, bytes]]:
    """(configuration, files by their path in the model's folder)."""
    config: str | None = None
    files: dict[str, bytes] = {}
    for name, value in parameters.items():
        if name == "config":
            if not isinstance(value, str) or len(value) > MAX_CONFIG_BYTES:
                raise InvalidRequestError(
                    "invalid value type for load parameter 'config', expected string_param. of at "
                    f"most {MAX_CONFIG_BYTES} characters",
                    param=name,
                )
            config = value
        elif name.startswith("file:"):
            if not isinstance(value, bytes):
                raise InvalidRequestError(
                    f"invalid value type for load parameter '{name[:80]}', expected bytes_param.",
                    param=name,
                )
            files[name.removeprefix("file:")] = value
        else:
            raise InvalidRequestError(
                f"unrecognized load parameter '{name[:80]}'. It takes 'config' and 'file:<path>'",
                param=name,
            )
    if len(files) > MAX_FILES:
        raise InvalidRequestError(f"a load takes at most {MAX_FILES} files, got {len(files)}")
    if files and config is None:
        raise InvalidRequestError("override model directory requires 'config' along with files")
    return config, files


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
