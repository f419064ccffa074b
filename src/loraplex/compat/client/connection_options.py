"""The flags by which a program finds its server."""

import dataclasses

from loraplex.compat.client.flags import flag


@dataclasses.dataclass(frozen=True, kw_only=True)
class GrpcOptions:
    """A server over gRPC, with TLS or without."""

    verbose: bool = flag("-v", "--verbose", help="Print more.", default=False)
    url: str = flag("-u", "--url", help="HOST:PORT of gRPC.", default="localhost:8001")
    ssl: bool = flag("--ssl", help="Speak TLS.", default=False, is_ours=True)
    root_certificates: str | None = flag(
        "--root-certificates", help="A PEM file; else the system's.", default=None, is_ours=True
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TlsOptions(GrpcOptions):
    """The same by short names, and what few servers ask for."""

    ssl: bool = flag("-s", "--ssl", help="Speak TLS.", default=False)
    root_certificates: str | None = flag(
        "-r", "--root-certificates", help="A PEM file; else the system's.", default=None
    )
    private_key: str | None = flag(
        "-p", "--private-key", help="A PEM file, where the server asks for one.", default=None
    )
    certificate_chain: str | None = flag(
        "-x", "--certificate-chain", help="A PEM file that belongs to the key.", default=None
    )
    grpc_compression_algorithm: str | None = flag(
        "-C", "--grpc-compression-algorithm", help="none, deflate or gzip.", default=None
    )
    stream_timeout: float | None = flag(
        "-t", "--stream-timeout", help="Seconds that a stream may last.", default=None
    )
