"""Classification, statistics, headers, compression, health, and every route and RPC there is."""

import grpc
import httpx
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from google.protobuf.json_format import MessageToDict
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

from loraplex.core.errors import UnauthenticatedError
from loraplex.frontends.kserve.grpc.health import HealthCheckRequest, HealthCheckResponse
from support.served_triton import served_triton
from support.triton_requests import TRUE, tensors, text_request, token_request


def as_dict(response):
    """Convert a response of either tritonclient to a dictionary."""
    if isinstance(response, dict | list):
        return response
    return MessageToDict(response, preserving_proto_field_name=True)


# ---------------------------------------------------------------- classification


def test_classification(wire):
    module, client = wire
    output = module.InferRequestedOutput("output_log_probs", class_count=2)
    inputs = token_request(module, return_log_probs=TRUE)
    result = client.infer("tensorrt_llm", inputs, outputs=[output])
    classes = result.as_numpy("output_log_probs")
    assert classes.shape == (1, 2)
    plain = client.infer("tensorrt_llm", inputs).as_numpy("output_log_probs").ravel()
    best = np.argsort(-plain, kind="stable")[:2]
    assert classes.tolist() == [[f"{plain[i]:f}:{i}".encode() for i in best]]
    output = module.InferRequestedOutput("text_output", class_count=2)
    # Triton's text.
    with pytest.raises(InferenceServerException, match="due to unsupported type 'BYTES'"):
        client.infer("ensemble", text_request(module), outputs=[output])


# ---------------------------------------------------------------- statistics


def test_statistics_by_phase_and_batch_size(wire, backend):
    module, client = wire
    texts = np.array([["a"], ["bcd"]], dtype=object)
    many = tensors(module, text_input=texts, max_tokens=np.full((2, 1), 50, dtype=np.int32))
    client.infer("ensemble", many)
    client.infer("ensemble", text_request(module))
    stats = as_dict(client.get_inference_statistics("ensemble"))["model_stats"][0]
    inference = stats["inference_stats"]
    total = int(inference["success"]["ns"])
    phases = [inference[name] for name in ("compute_input", "compute_infer", "compute_output")]
    assert all(int(phase["count"]) == 2 and int(phase["ns"]) > 0 for phase in phases)
    assert sum(int(phase["ns"]) for phase in phases) + int(inference["queue"].get("ns", 0)) <= total
    assert [int(row["batch_size"]) for row in stats["batch_stats"]] == [1, 2]
    assert [int(row["compute_infer"]["count"]) for row in stats["batch_stats"]] == [1, 1]
    assert int(stats["last_inference"]) > 1.7e12
    assert (int(stats["inference_count"]), int(stats["execution_count"])) == (3, 2)


def test_statistics_of_streamed_responses(triton, grpc_client):
    results = []
    grpc_client.start_stream(lambda result, error: results.append(error))
    grpc_client.async_stream_infer("ensemble", text_request(tritonclient.grpc, stream=TRUE))
    grpc_client.stop_stream()
    stats = grpc_client.get_inference_statistics("ensemble").model_stats[0]
    assert sorted(map(int, stats.response_stats)) == list(range(len(results)))
    assert {row.success.count for row in stats.response_stats.values()} == {1}
    assert triton.service.counts.of("ensemble").num_pending == 0


# ---------------------------------------------------------------- what stands in headers


def test_compressed_calls(wire):
    module, client = wire
    if module is tritonclient.grpc:
        for algorithm in ("gzip", "deflate"):
            result = client.infer("ensemble", text_request(module), compression_algorithm=algorithm)
            assert result.as_numpy("text_output").tolist() == [b"hiecho: hi"]
        return
    for algorithm in ("gzip", "deflate"):
        result = client.infer(
            "ensemble",
            text_request(module),
            request_compression_algorithm=algorithm,
            response_compression_algorithm=algorithm,
        )
        assert result.as_numpy("text_output").tolist() == [b"hiecho: hi"]


# ---------------------------------------------------------------- gRPC


def test_grpc_health(triton, backend):
    codecs = {
        "request_serializer": HealthCheckRequest.SerializeToString,
        "response_deserializer": HealthCheckResponse.FromString,
    }
    with grpc.insecure_channel(triton.grpc) as channel:
        check = channel.unary_unary("/grpc.health.v1.Health/Check", **codecs)
        watch = channel.unary_stream("/grpc.health.v1.Health/Watch", **codecs)
        assert check(HealthCheckRequest()).status == 1
        assert check(HealthCheckRequest(service="inference.GRPCInferenceService")).status == 1
        statuses = watch(HealthCheckRequest())
        assert next(statuses).status == 1
        backend.unready_reason = "the engine restarts"
        assert next(statuses).status == 2
        assert check(HealthCheckRequest()).status == 2
        statuses.cancel()


def grpc_error(call, request):
    try:
        call(request)
    except grpc.RpcError as error:
        return error
    return None


def test_every_rpc_is_served(triton):
    """None of the protocol's RPCs is UNIMPLEMENTED by default."""
    with grpc.insecure_channel(triton.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        for method in service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods:
            request = getattr(service_pb2, method.input_type.name)()
            if method.name == "ModelStreamInfer":
                responses = list(stub.ModelStreamInfer(iter([request])))
                # Triton's text.
                assert "unknown model" in responses[0].error_message
                continue
            call = getattr(stub, method.name).with_call
            error = grpc_error(call, request)
            if error is not None:
                assert error.details(), method.name
                is_refused = error.code() is grpc.StatusCode.UNIMPLEMENTED
                assert is_refused == (method.name == "CudaSharedMemoryRegister"), method.name


def test_authentication_covers_all_that_is_the_servers(backend):
    def authenticate(headers):
        raise UnauthenticatedError("the key is not known")

    with served_triton(backend, authenticate=authenticate) as triton:
        with tritonclient.grpc.InferenceServerClient(triton.grpc) as client:
            for send in (
                client.get_system_shared_memory_status,
                client.get_log_settings,
                client.get_trace_settings,
                lambda: client.load_model("ensemble"),
            ):
                with pytest.raises(InferenceServerException, match="the key is not known"):
                    send()
        for path in ("v2/systemsharedmemory/status", "v2/logging", "v2/trace/setting"):
            assert httpx.get(f"http://{triton.http}/{path}", timeout=60).status_code == 401


ROUTES = {
    "v2": "GET",
    "v2/health/live": "GET",
    "v2/health/ready": "GET",
    "v2/models/stats": "GET",
    "v2/models/ensemble": "GET",
    "v2/models/ensemble/versions/1": "GET",
    "v2/models/ensemble/ready": "GET",
    "v2/models/ensemble/versions/1/ready": "GET",
    "v2/models/ensemble/config": "GET",
    "v2/models/ensemble/versions/1/config": "GET",
    "v2/models/ensemble/stats": "GET",
    "v2/models/ensemble/versions/1/stats": "GET",
    "v2/models/ensemble/infer": "POST",
    "v2/models/ensemble/versions/1/infer": "POST",
    "v2/models/ensemble/generate": "POST",
    "v2/models/ensemble/versions/1/generate": "POST",
    "v2/models/ensemble/generate_stream": "POST",
    "v2/models/ensemble/versions/1/generate_stream": "POST",
    "v2/models/ensemble/trace/setting": "GET POST",
    "v2/trace/setting": "GET POST",
    "v2/logging": "GET POST",
    "v2/repository/index": "POST",
    "v2/repository/models/ensemble/load": "POST",
    "v2/repository/models/ensemble/unload": "POST",
    "v2/systemsharedmemory/status": "GET",
    "v2/systemsharedmemory/region/r/status": "GET",
    "v2/systemsharedmemory/region/r/register": "POST",
    "v2/systemsharedmemory/unregister": "POST",
    "v2/systemsharedmemory/region/r/unregister": "POST",
    "v2/cudasharedmemory/status": "GET",
    "v2/cudasharedmemory/region/r/status": "GET",
    "v2/cudasharedmemory/region/r/register": "POST",
    "v2/cudasharedmemory/unregister": "POST",
    "v2/cudasharedmemory/region/r/unregister": "POST",
}


def test_every_route_is_there_with_its_verbs(triton):
    with httpx.Client(base_url=f"http://{triton.http}", timeout=60) as client:
        for path, verbs in ROUTES.items():
            for verb in ("GET", "POST", "DELETE", "PUT", "PATCH"):
                response = client.request(verb, path)
                if verb in verbs.split():
                    assert response.status_code != 405, path
                    assert response.text != '{"error":"Not Found"}', path
                else:
                    assert response.status_code == 405, path
                    assert response.json() == {"error": "Method Not Allowed"}
                    assert set(response.headers["allow"].split(", ")) == set(verbs.split())


def test_other_paths_are_not_found(triton):
    for path in ("v2/nope", "v2/systemsharedmemory", "v2/repository", "v2/logging/x"):
        for verb in ("GET", "POST", "DELETE"):
            response = httpx.request(verb, f"http://{triton.http}/{path}", timeout=60)
            assert (response.status_code, response.json()) == (404, {"error": "Not Found"})
