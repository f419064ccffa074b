"""The models of the real Triton that transport.py uses: echoes, in its Python backend.

One that responds once, one that is decoupled, and one as the TensorRT-LLM backend's repositories
have it: an ensemble of three. Ours serves all of them with the backend of its `ensemble`.
"""

from pathlib import Path

from transport_server import ENSEMBLE_OF_THREE, MAX_BATCH_SIZE, STREAMED, UNARY

_INPUTS = """
input [
  { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] },
  { name: "max_tokens" data_type: TYPE_INT32 dims: [ 1 ] }
]
"""
_STREAM_INPUT = """
input [ { name: "stream" data_type: TYPE_BOOL dims: [ 1 ] optional: true } ]
"""
_OUTPUTS = """
output [ { name: "text_output" data_type: TYPE_STRING dims: [ -1 ] } ]
"""
_BACKEND = """
backend: "python"
instance_group [ { count: 1 kind: KIND_CPU } ]
"""
_ONE_RESPONSE_EACH = """
import numpy as np
import triton_python_backend_utils as backend


class TritonPythonModel:
    def execute(self, requests):
        return [backend.InferenceResponse(respond(request)) for request in requests]


def sent(request, name):
    return backend.get_input_tensor_by_name(request, name).as_numpy()
"""
_UNARY_CODE = """

def respond(request):
    return [backend.Tensor("text_output", sent(request, "text_input"))]
"""
_STREAMED_CODE = """
import triton_python_backend_utils as backend


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            text = backend.get_input_tensor_by_name(request, "text_input").as_numpy()
            count = backend.get_input_tensor_by_name(request, "max_tokens").as_numpy().item()
            for index in range(count):
                response = backend.InferenceResponse([backend.Tensor("text_output", text)])
                is_last = index == count - 1
                final = backend.TRITONSERVER_RESPONSE_COMPLETE_FINAL if is_last else 0
                sender.send(response, flags=final)
"""

# Of the three: a character is a token, so that nothing is timed that is no transport.
_PREPROCESSING_TENSORS = """
input [
  { name: "QUERY" data_type: TYPE_STRING dims: [ 1 ] },
  { name: "REQUEST_OUTPUT_LEN" data_type: TYPE_INT32 dims: [ 1 ] }
]
output [
  { name: "INPUT_ID" data_type: TYPE_INT32 dims: [ -1 ] },
  { name: "REQUEST_INPUT_LEN" data_type: TYPE_INT32 dims: [ 1 ] },
  { name: "REQUEST_OUTPUT_LEN" data_type: TYPE_INT32 dims: [ 1 ] }
]
"""
_PREPROCESSING_CODE = """

def respond(request):
    ids = np.array([list(sent(request, "QUERY").item())], dtype=np.int32)
    return [
        backend.Tensor("INPUT_ID", ids),
        backend.Tensor("REQUEST_INPUT_LEN", np.array([[ids.size]], dtype=np.int32)),
        backend.Tensor("REQUEST_OUTPUT_LEN", sent(request, "REQUEST_OUTPUT_LEN")),
    ]
"""
_TENSORRT_LLM_TENSORS = """
input [
  { name: "input_ids" data_type: TYPE_INT32 dims: [ -1 ] },
  { name: "input_lengths" data_type: TYPE_INT32 dims: [ 1 ] },
  { name: "request_output_len" data_type: TYPE_INT32 dims: [ 1 ] }
]
output [
  { name: "output_ids" data_type: TYPE_INT32 dims: [ -1, -1 ] },
  { name: "sequence_length" data_type: TYPE_INT32 dims: [ -1 ] }
]
"""
_TENSORRT_LLM_CODE = """

def respond(request):
    return [
        backend.Tensor("output_ids", sent(request, "input_ids")[:, None, :].copy()),
        backend.Tensor("sequence_length", sent(request, "input_lengths")),
    ]
"""
_POSTPROCESSING_TENSORS = """
input [
  { name: "TOKENS_BATCH" data_type: TYPE_INT32 dims: [ -1, -1 ] },
  { name: "SEQUENCE_LENGTH" data_type: TYPE_INT32 dims: [ -1 ] }
]
output [ { name: "OUTPUT" data_type: TYPE_STRING dims: [ -1 ] } ]
"""
_POSTPROCESSING_CODE = """

def respond(request):
    ids, lengths = sent(request, "TOKENS_BATCH"), sent(request, "SEQUENCE_LENGTH")
    texts = [[bytes(ids[0, 0, : lengths.item()].tolist())]]
    return [backend.Tensor("OUTPUT", np.array(texts, dtype=object))]
"""
_STEPS = """
ensemble_scheduling {
  step [
    {
      model_name: "preprocessing"
      model_version: -1
      input_map { key: "QUERY" value: "text_input" }
      input_map { key: "REQUEST_OUTPUT_LEN" value: "max_tokens" }
      output_map { key: "INPUT_ID" value: "_INPUT_ID" }
      output_map { key: "REQUEST_INPUT_LEN" value: "_REQUEST_INPUT_LEN" }
      output_map { key: "REQUEST_OUTPUT_LEN" value: "_REQUEST_OUTPUT_LEN" }
    },
    {
      model_name: "tensorrt_llm"
      model_version: -1
      input_map { key: "input_ids" value: "_INPUT_ID" }
      input_map { key: "input_lengths" value: "_REQUEST_INPUT_LEN" }
      input_map { key: "request_output_len" value: "_REQUEST_OUTPUT_LEN" }
      output_map { key: "output_ids" value: "_TOKENS_BATCH" }
      output_map { key: "sequence_length" value: "_SEQUENCE_LENGTH" }
    },
    {
      model_name: "postprocessing"
      model_version: -1
      input_map { key: "TOKENS_BATCH" value: "_TOKENS_BATCH" }
      input_map { key: "SEQUENCE_LENGTH" value: "_SEQUENCE_LENGTH" }
      output_map { key: "OUTPUT" value: "text_output" }
    }
  ]
}
"""
_ECHO = _BACKEND + _INPUTS + _STREAM_INPUT + _OUTPUTS
_MODELS = {
    UNARY: (_ECHO, _ONE_RESPONSE_EACH + _UNARY_CODE),
    STREAMED: (_ECHO + "model_transaction_policy { decoupled: true }\n", _STREAMED_CODE),
    "preprocessing": (_BACKEND + _PREPROCESSING_TENSORS, _ONE_RESPONSE_EACH + _PREPROCESSING_CODE),
    "tensorrt_llm": (_BACKEND + _TENSORRT_LLM_TENSORS, _ONE_RESPONSE_EACH + _TENSORRT_LLM_CODE),
    "postprocessing": (
        _BACKEND + _POSTPROCESSING_TENSORS,
        _ONE_RESPONSE_EACH + _POSTPROCESSING_CODE,
    ),
    ENSEMBLE_OF_THREE: ('platform: "ensemble"\n' + _INPUTS + _OUTPUTS + _STEPS, ""),
}
"""Configuration and Python backend code by model name."""


def write_repository(folder: Path) -> None:
    """A model repository, from nothing."""
    for name, (config, code) in _MODELS.items():
        version = folder / name / "1"
        version.mkdir(parents=True)
        if code:
            (version / "model.py").write_text(code)
        head = f'name: "{name}"\nmax_batch_size: {MAX_BATCH_SIZE}\n'
        (version.parent / "config.pbtxt").write_text(head + config)
