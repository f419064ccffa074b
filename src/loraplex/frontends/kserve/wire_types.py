"""The JSON objects of Triton's routes, of the KServe v2 protocol and of Triton's extensions."""

from typing import Any, NotRequired, TypedDict

from loraplex.frontends.kserve.messages import Parameter


class TritonFailure(TypedDict):
    error: str


class ServerMetadata(TypedDict):
    name: str
    version: str
    extensions: list[str]


class TensorMetadata(TypedDict):
    name: str
    datatype: str
    shape: list[int]


class ModelMetadata(TypedDict):
    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]


class ModelConfig(TypedDict):
    """The fields of Triton's model_config.proto that there are."""

    name: str
    max_batch_size: int
    input: list[dict[str, Any]]
    output: list[dict[str, Any]]


class ModelStatistics(TypedDict):
    """Triton's ModelStatistics; durations are nanoseconds."""

    name: str
    version: str
    last_inference: int
    inference_count: int
    execution_count: int
    inference_stats: dict[str, Any]
    response_stats: dict[str, Any]
    batch_stats: list[dict[str, Any]]
    memory_usage: list[Any]


class StatisticsReport(TypedDict):
    model_stats: list[ModelStatistics]


class InputTensor(TypedDict):
    """Its elements are in `data`, or after the JSON, or in shared memory; see `parameters`."""

    name: str
    datatype: str
    shape: list[int]
    data: NotRequired[list[Any]]
    parameters: NotRequired[dict[str, Any]]


class WantedOutput(TypedDict):
    name: str
    parameters: NotRequired[dict[str, Any]]


class InferBody(TypedDict):
    inputs: list[InputTensor]
    outputs: NotRequired[list[WantedOutput]]
    id: NotRequired[str]
    parameters: NotRequired[dict[str, Parameter]]


class OutputTensor(TypedDict):
    name: str
    datatype: str
    shape: list[int]
    data: NotRequired[list[Any]]
    parameters: NotRequired[dict[str, Any]]


class InferResult(TypedDict):
    model_name: str
    model_version: str
    outputs: list[OutputTensor]
    id: NotRequired[str]
    parameters: NotRequired[dict[str, Parameter]]


class TritonGenerateBody(TypedDict):
    """Inputs of the model by name, and parameters of the request."""

    id: NotRequired[str]
    parameters: NotRequired[dict[str, Any]]


class TritonGenerateResult(TypedDict):
    """Outputs of the model by name, in addition to these."""

    model_name: str
    model_version: str
    id: NotRequired[str]


class IndexBody(TypedDict):
    ready: NotRequired[bool]


class IndexRow(TypedDict):
    name: str
    version: str
    state: str
    reason: NotRequired[str]


class ControlBody(TypedDict):
    parameters: NotRequired[dict[str, Any]]


class RegionBody(TypedDict):
    key: str
    byte_size: int
    offset: NotRequired[int]


class Region(TypedDict):
    name: str
    key: str
    offset: int
    byte_size: int


class TraceSettings(TypedDict):
    trace_level: list[str]
    trace_rate: str
    trace_count: str
    log_frequency: str
    trace_file: str
    trace_mode: str


class LogSettings(TypedDict):
    log_file: str
    log_info: bool
    log_warning: bool
    log_error: bool
    log_verbose_level: int
    log_format: str


Changes = dict[str, Any]
"""Settings by name; names that are not known change nothing."""
