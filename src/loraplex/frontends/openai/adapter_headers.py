"""The headers that tell adapters, as the OpenAPI document shows them."""

from loraplex.frontends.openai.adapter_fields import ADAPTER_HEADER
from loraplex.frontends.openai.answers import DIGESTS_HEADER
from loraplex.frontends.openapi.operation import Parameter

BY_HEADER = Parameter(ADAPTER_HEADER, "An adapter of the base model, as lora_model names it.")
DIGESTS = Parameter(
    DIGESTS_HEADER, "The digests of the adapters that answer; absent for the base model."
)
