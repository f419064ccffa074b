"""Request socket over an EchoService, used through the connection that runs inside Triton."""

import contextlib
import os
import queue
import re
import select
import socket
import stat
import threading
import time

import msgspec
import numpy as np
import pytest

from loraplex.core.errors import ConfigError, QueueFullError, StepFailedError
from loraplex.frontends.kserve.models.kinds import VLLM
from loraplex.frontends.kserve.models.triton_model import ModelDeclaration
from loraplex.frontends.kserve.request_socket import bind
from loraplex.frontends.kserve.stub.connection import Connection, ConnectionLost, MessageTooLarge
from loraplex.frontends.kserve.stub.wire import (
    LENGTH,
    Infer,
    RequestFailure,
    Response,
    Welcome,
    WireTensor,
    frame,
    read_from_server,
)
from loraplex.frontends.kserve.tensors import from_raw, from_values, to_raw
from support.echo_service import EchoService
from support.eventually import eventually
from support.naming import naming
from support.served_socket import served_socket


@pytest.fixture
def backend():
    return EchoService()


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "socket")


@pytest.fixture
def served(backend, path):
    with served_socket(backend, path) as served:
        yield served
    assert served.service.num_active == 0


@pytest.fixture
def lost():
    return queue.Queue()


@pytest.fixture
def connection(served, lost):
    connection = Connection(served.path, lost.put)
    yield connection
    connection.close()


def wire(name, datatype, shape, values):
    tensor = from_values(name, datatype, shape, values)
    return WireTensor(name, datatype, tuple(shape), to_raw(tensor))


def request(text="hi", max_tokens=50, *, stream=None, **more):
    inputs = [wire("text_input", "BYTES", [1, 1], [text])]
    inputs.append(wire("max_tokens", "INT32", [1, 1], [max_tokens]))
    if stream is not None:
        inputs.append(wire("stream", "BOOL", [1, 1], [stream]))
    return Infer(id=0, model="ensemble", inputs=tuple(inputs), **more)


def all_responses(connection, message):
    responses = queue.Queue()
    connection.submit(message, responses.put)
    found = [responses.get(timeout=60)]
    while isinstance(found[-1], Response) and not found[-1].is_final:
        found.append(responses.get(timeout=60))
    return found


def text_of(response):
    output = next(t for t in response.outputs if t.name == "text_output")
    return from_raw(output.name, output.datatype, output.shape, output.data).array.flat[0].decode()


# ---------------------------------------------------------------- responses


def test_one_response(connection):
    (reply,) = all_responses(connection, request("hi", request_id="a", is_unary=True))
    assert reply.is_final
    assert text_of(reply).startswith("hi")


def test_a_stream_comes_in_order_and_ends_once(connection):
    whole = text_of(all_responses(connection, request("hi", stream=False))[-1])
    pieces = all_responses(connection, request("hi", stream=True))
    assert len(pieces) > 2
    assert [piece.is_final for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert "hi" + "".join(map(text_of, pieces)) == whole


def test_only_the_requested_outputs(connection):
    sent = request(requested=("output_log_probs",))
    flag = wire("return_log_probs", "BOOL", [1, 1], [True])
    sent = msgspec.structs.replace(sent, inputs=(*sent.inputs, flag))
    (reply,) = all_responses(connection, sent)
    assert [output.name for output in reply.outputs] == ["output_log_probs"]


def test_requests_of_one_connection_do_not_wait_for_each_other(backend, connection):
    backend.delay_seconds = 0.02
    slow = queue.Queue()
    connection.submit(request("a" * 40, 400, stream=True), slow.put)
    slow.get(timeout=60)
    backend.delay_seconds = 0.0
    assert len(all_responses(connection, request("hi", 3))) == 1


def test_errors_have_the_kind_and_the_text_of_the_grpc_front_end(backend, connection):
    backend.plant(QueueFullError("try later"))
    (failure,) = all_responses(connection, request())
    assert failure.kind == "UNAVAILABLE"
    # Triton's text.
    assert failure.message.startswith("Exceeds maximum queue size")
    (failure,) = all_responses(connection, Infer(id=0, model="nope"))
    assert (failure.kind, failure.message[:37]) == (
        "NOT_FOUND",
        "Request for unknown model: 'nope' is ",
    )
    bad = Infer(id=0, model="ensemble", inputs=(WireTensor("text_input", "INT8", (1,), b"12"),))
    (failure,) = all_responses(connection, bad)
    assert failure.kind == "INVALID_ARGUMENT"
    # Triton's text.
    assert "input byte size mismatch" in failure.message


def test_an_error_in_mid_stream_is_the_end(backend, connection):
    backend.plant(StepFailedError("it broke"), after_outputs=2)
    *pieces, failure = all_responses(connection, request(stream=True))
    assert len(pieces) == 2
    assert (failure.kind, failure.message) == ("INTERNAL", "it broke")


def test_some_errors_have_outputs_even_so(backend, path):
    declaration = ModelDeclaration(name="v", kind=VLLM, base_model="echo", is_decoupled=True)
    with served_socket(backend, path, declarations=[declaration]):
        connection = Connection(path, lambda reason: None)
        inputs = (
            wire("text_input", "BYTES", [1], ["hi"]),
            wire("sampling_parameters", "BYTES", [1], ['{"lora_name": "gone"}']),
        )
        (failure,) = all_responses(connection, Infer(id=0, model="v", inputs=inputs))
        assert text_of(failure) == failure.message
        # vLLM's text.
        assert failure.message.startswith("LoRA gone is not supported")
        connection.close()


def test_a_defect_of_ours_is_reported_without_its_details(served, connection, monkeypatch):
    def broken(*_):
        raise KeyError("secret")

    monkeypatch.setattr(served.service.catalog, "find", broken)
    (failure,) = all_responses(connection, request())
    assert failure.kind == "INTERNAL"
    assert "secret" not in failure.message


# ---------------------------------------------------------------- ends


def test_a_cancelled_request_is_aborted_and_says_so(backend, connection):
    backend.delay_seconds = 0.01
    responses = queue.Queue()
    number = connection.submit(request("hi", 4000, stream=True), responses.put)
    responses.get(timeout=60)
    connection.cancel(number)
    last = None
    while not isinstance(last, RequestFailure):
        last = responses.get(timeout=60)
    assert (last.kind, last.message) == ("CANCELLED", "Request was cancelled")
    assert len(backend.aborted) == 1
    connection.cancel(number)  # it has ended
    assert len(all_responses(connection, request("hi", 3))) == 1


@pytest.mark.parametrize("silence_seconds", [600.0, 0.2])
def test_a_client_that_does_not_read_is_disconnected(backend, path, silence_seconds):
    """Also when it has fallen silent, and the last bytes wait for it."""
    large = request("x" * 3000, 1000, stream=True)
    times = {"silence_seconds": silence_seconds, "unread_seconds": 0.5}
    with served_socket(backend, path, **times) as served, client(path) as raw:
        with contextlib.suppress(ConnectionError):  # it may be so already
            for number in range(20):
                raw.sendall(frame(msgspec.structs.replace(large, id=number)))
        ends = select.poll()
        ends.register(raw, 0)
        assert eventually(lambda: bool(ends.poll(0)))
        assert eventually(lambda: served.service.num_active == 0)


def test_requests_of_a_client_that_goes_away_are_aborted(served, backend):
    backend.delay_seconds = 0.01
    connection = Connection(served.path, lambda reason: None)
    responses = queue.Queue()
    connection.submit(request("hi", 4000, stream=True), responses.put)
    responses.get(timeout=60)
    connection.close()
    assert eventually(lambda: len(backend.aborted) == 1)
    last = responses.get(timeout=60)
    while isinstance(last, Response):
        last = responses.get(timeout=60)
    assert last.message == "the model is unloaded"


def test_a_silent_client_is_taken_for_dead(backend, path):
    backend.delay_seconds = 600.0
    with served_socket(backend, path, silence_seconds=1) as served, client(path) as raw:
        raw.sendall(frame(request("hi", 4000, stream=True)))
        assert eventually(lambda: len(backend.aborted) == 1)
        assert served.service.num_active == 0


def test_a_ping_gets_the_state_of_the_server(backend, connection):
    backend.unready_reason = "it wakes up"
    connection.ping()
    status = connection.wait_for_status(10)
    assert (status.is_ready, status.reason) == (False, backend.health().reason)
    assert "it wakes up" in status.reason
    assert "ensemble" in status.models


def test_when_the_server_ends_every_request_fails_and_the_client_is_notified(
    served, backend, connection, lost
):
    backend.delay_seconds = 0.01
    responses = [queue.Queue(), queue.Queue()]
    for each in responses:
        connection.submit(request("hi", 4000, stream=True), each.put)
        each.get(timeout=60)
    served.stop()
    assert "has ended" in lost.get(timeout=60)
    for each in responses:
        last = each.get(timeout=60)
        while isinstance(last, Response):
            last = each.get(timeout=60)
        assert last.kind == "UNAVAILABLE"
    with pytest.raises(ConnectionLost, match=naming(served.path)):
        connection.submit(request(), print)


def test_a_server_that_falls_silent_is_taken_for_dead(path, lost):
    with bind(path) as listener:
        listener.listen()
        opened = threading.Thread(target=_greet_and_hang, args=(listener,), daemon=True)
        opened.start()
        connection = Connection(path, lost.put, silence_seconds=0.2)
        assert "has fallen silent" in lost.get(timeout=60)
        connection.close()


def _greet_and_hang(listener):
    peer, _ = listener.accept()
    peer.sendall(frame(Welcome(protocol=1, max_message_bytes=100)))
    with contextlib.suppress(OSError):
        peer.recv(1)
    peer.close()


def test_a_server_that_ends_with_unread_requests_has_ended(path, lost):
    """The kernel resets such a connection instead of closing it."""
    is_sent = threading.Event()

    def greet_and_end(listener):
        peer, _ = listener.accept()
        peer.sendall(frame(Welcome(protocol=1, max_message_bytes=100)))
        is_sent.wait(60)
        peer.close()

    with bind(path) as listener:
        listener.listen()
        threading.Thread(target=greet_and_end, args=(listener,), daemon=True).start()
        connection = Connection(path, lost.put)
        connection.ping()
        is_sent.set()
        assert "has ended" in lost.get(timeout=60)
        connection.close()


def test_another_version_of_the_protocol_is_refused(path, lost):
    def greet(listener):
        peer, _ = listener.accept()
        peer.sendall(frame(Welcome(protocol=99, max_message_bytes=100)))
        peer.close()

    with bind(path) as listener:
        listener.listen()
        threading.Thread(target=greet, args=(listener,), daemon=True).start()
        with pytest.raises(ConnectionLost, match=naming(path)):
            Connection(path, lost.put)


# ---------------------------------------------------------------- what is wrong


NO_UTF8 = b"\x83\xa4type\xa5infer\xa2id\x01\xa5model\xa1\xff"


@contextlib.contextmanager
def client(path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as raw:
        raw.settimeout(60)
        raw.connect(path)
        assert isinstance(message_from(raw), Welcome)
        yield raw


def message_from(raw):
    """None at the end."""
    head = raw.recv(LENGTH.size, socket.MSG_WAITALL)
    if not head:
        return None
    return read_from_server(raw.recv(LENGTH.unpack(head)[0], socket.MSG_WAITALL))


@pytest.mark.parametrize(
    ("sent", "named"),
    [
        (LENGTH.pack(2**21), (2097152, 1048576)),
        (LENGTH.pack(4) + b"\xc1aaa", ("protocol",)),
        (LENGTH.pack(1) + b"\x80", ("protocol",)),
        (LENGTH.pack(len(NO_UTF8)) + NO_UTF8, ("utf-8",)),
    ],
)
def test_what_is_no_message_ends_the_connection_with_a_reason(served, sent, named):
    with client(served.path) as raw:
        raw.sendall(sent)
        failure = message_from(raw)
        assert failure.id is None
        assert re.search(naming(*named), failure.message)
        assert message_from(raw) is None


def test_an_id_that_is_in_use_ends_the_connection(served, backend):
    backend.delay_seconds = 0.01
    with client(served.path) as raw:
        raw.sendall(frame(request("hi", 4000)) * 2)
        message = message_from(raw)
        assert re.search(naming("id 0"), message.message)
        assert message_from(raw) is None
    assert len(backend.aborted) == len(backend.requests)


def test_a_request_that_is_too_large_is_not_sent(connection):
    with pytest.raises(MessageTooLarge, match=naming(1048576)):
        connection.submit(request("a" * 2**20), print)
    assert len(all_responses(connection, request("hi", 3))) == 1


def test_a_client_that_does_not_read_makes_only_its_own_requests_wait(served, backend, connection):
    """What it does not read is held back: its requests do not come to their ends."""
    with client(served.path) as raw:
        long = request("a" * 1000, 1000, stream=True)
        for number in range(1, 5):
            raw.sendall(frame(msgspec.structs.replace(long, id=number)))
        assert eventually(lambda: len(backend.requests) == 4)
        time.sleep(2)  # without back-pressure enough for all
        assert len(all_responses(connection, request("hi", 3))) == 1
        assert len(backend.finished) < 4
    assert eventually(lambda: served.service.num_active == 0)
    assert len(backend.aborted) > 0


# ---------------------------------------------------------------- the file


def test_only_the_user_may_open_the_socket_and_it_goes_with_the_server(backend, path):
    with served_socket(backend, path):
        mode = os.lstat(path).st_mode
        assert stat.S_ISSOCK(mode)
        assert stat.S_IMODE(mode) == 0o600
    assert not os.path.exists(path)


def test_the_socket_of_a_dead_server_is_replaced(backend, path):
    bind(path).close()
    assert os.path.exists(path)
    with served_socket(backend, path):
        Connection(path, lambda reason: None).close()


def test_the_socket_of_a_living_server_and_another_file_are_kept(served, tmp_path):
    with pytest.raises(ConfigError, match=naming("request_socket", served.path)):
        bind(served.path)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match=naming("request_socket", tmp_path / "file")):
        bind(str(tmp_path / "file"))
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(
    ("path", "reason"),
    [("/tmp/" + "a" * 103, "has 108 bytes"), ("/nowhere/at/all", "No such file or directory")],
)
def test_a_path_where_no_socket_can_be_is_reported(path, reason):
    with pytest.raises(ConfigError, match=f"request_socket: .*{reason}"):
        bind(path)


def test_inline_weights_arrive_bit_by_bit(backend, connection):
    bits = np.arange(12, dtype=np.uint16).reshape(1, 3, 4)
    inputs = (
        *request().inputs,
        wire("lora_task_id", "UINT64", [1, 1], [5]),
        WireTensor("lora_weights", "BF16", bits.shape, bits.tobytes()),
        wire("lora_config", "INT32", [1, 3, 3], [0, 0, 8] * 3),
    )
    (reply,) = all_responses(connection, Infer(id=0, model="ensemble", inputs=inputs))
    assert isinstance(reply, Response), reply
    ((weights, _),) = backend.adapter_tensors
    assert bytes(weights.view) == bits.tobytes()
