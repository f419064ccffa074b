"""KServe v2 as Triton speaks it: HTTP and gRPC, with the models of the TensorRT-LLM backend.

    models/   the Triton models that we serve (their tensor tables are data), and the conversion of
              their tensors to a GenerateRequest and back
    service   admits, runs and stops inference requests; the one object that both wires share
    http/     Starlette routes        grpc/   a grpc.aio server, on the same loop

A server builds one `service.TritonService` over its Backend, mounts
`http.routes.kserve_routes(service)` and starts `grpc.server.GrpcServer(service, host, port)`.
"""
