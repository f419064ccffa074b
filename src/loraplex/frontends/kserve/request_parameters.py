"""The parameters of requests and of their tensors, as Triton, its clients and we know them.

Others are sampling parameters of a model of the vLLM backend, and mean nothing to other models.
"""

from typing import Final

from loraplex.core.support import Feature, Support

REQUEST_TYPE: Final = "request_type"

REQUEST_PARAMETERS: Final = (
    Feature("priority", note="1 comes first; 0: none, as level 100", form="integer"),
    Feature("timeout", note="microseconds until the request is given up", form="integer"),
    Feature("binary_data_output", note="all outputs as binary data", form="boolean"),
    Feature("adapters", note="names of adapters, with weights", form="string", is_ours=True),
    Feature(
        REQUEST_TYPE,
        Support.REFUSED,
        "disaggregated serving; context_and_generation may stay",
        "string",
    ),
    Feature(
        "triton_enable_empty_final_response",
        Support.NO_EFFECT,
        "the last response of a stream is the final one: no empty one follows",
        "boolean",
    ),
    *(
        Feature(name, Support.NO_EFFECT, "of sequence batching")
        for name in ("sequence_id", "sequence_start", "sequence_end")
    ),
    Feature("Streaming", Support.NO_EFFECT, "the tensor of that name decides", "boolean"),
    Feature("headers", Support.NO_EFFECT, "models see no headers"),
)
TENSOR_PARAMETERS: Final = (
    Feature("binary_data_size", note="bytes of an input after the JSON", form="integer"),
    Feature("binary_data", note="of one output", form="boolean"),
    Feature("classification", note="of an output: the so many highest values", form="integer"),
    Feature("shared_memory_region", note="a region of system shared memory", form="string"),
    Feature("shared_memory_byte_size", note="of the region", form="integer"),
    Feature("shared_memory_offset", note="in the region", form="integer"),
)
