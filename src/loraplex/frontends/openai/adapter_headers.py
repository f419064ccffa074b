"""Response headers with the adapters, for the OpenAPI document."""

from loraplex.frontends.openai.adapter_fields import ADAPTER_HEADER
from loraplex.frontends.openai.writers import DIGESTS_HEADER
from loraplex.frontends.openapi.operation import Parameter

BY_HEADER = Parameter(ADAPTER_HEADER, "An adapter of the base model, as lora_model names it.")
DIGESTS = Parameter(
    DIGESTS_HEADER, "Digests of the adapters that were used; absent for the base model."
)
