"""What a client may send to the routes that manage adapters."""

from loraplex.frontends.openai.schema import Body, ClosedBody


class LoadLoraBody(Body):
    """vLLM's."""

    lora_name: str
    lora_path: str
    base_model_name: str | None = None
    load_inplace: bool | None = None


class UnloadLoraBody(Body):
    lora_name: str
    lora_int_id: int | None = None
    """vLLM's own number: taken, and of no use here."""


class DynamoSource(Body):
    uri: str
    """Source, like `path` of POST /v1/adapters; Dynamo sends file, s3 and hf addresses."""


class DynamoLoadBody(Body):
    """Dynamo's."""

    lora_name: str
    source: DynamoSource


class AdapterBody(ClosedBody):
    """POST /v1/adapters."""

    name: str
    path: str
    model: str | None = None
    """The base model; None is the default one."""
    task_id: int | None = None
    replace: bool | None = None
    dry_run: bool | None = None
    canary: bool | None = None
    details: bool | None = None
    """Report every tensor and a refusal of a dry run, instead of raising the refusal."""


class RollbackBody(ClosedBody):
    version: int | None = None
    """None: the one before the present."""


class PinBody(ClosedBody):
    version: int | None = None
    """None: the present one."""
    pinned: bool | None = None
    """False takes the pin away."""


class AliasBody(ClosedBody):
    alias: str
    replace: bool | None = None
    """Turn an alias of another adapter over to this one."""
