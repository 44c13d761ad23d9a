"""grpcio as a worker and as a hub, for Trio tests: what blocks, blocks in a thread, with a timeout of gRPC's own."""

from __future__ import annotations

import math
import queue
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import grpc
import structlog
import trio
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

SERVICE = "sandbox.sync.v1.FederationService"
SECRET = "p4Lx-9c2e-interop"
#: Seconds of real time after which gRPC gives up, and a test fails.
TIMEOUT = 20.0
#: Seconds of Trio's time after which a test fails; in some tests it runs ten times as fast.
PATIENCE = 200.0
#: grpcio's own limit, 4 MiB, is not what is tested.
NO_LIMITS = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]


class Schema:
    """The messages of one version of sync.proto, in a descriptor pool of their own."""

    def __init__(self, file: descriptor_pb2.FileDescriptorProto) -> None:
        pool = descriptor_pool.DescriptorPool()
        pool.Add(file)
        messages = message_factory.GetMessageClassesForFiles([file.name], pool)
        self.EnvCapacity = messages["sandbox.sync.v1.EnvCapacity"]
        self.ReportFederationRequest = messages["sandbox.sync.v1.ReportFederationRequest"]
        self.ReportFederationResponse = messages["sandbox.sync.v1.ReportFederationResponse"]
        self.WatchFederationRequest = messages["sandbox.sync.v1.WatchFederationRequest"]
        self.FederationBroadcast = messages["sandbox.sync.v1.FederationBroadcast"]

    def report(self, *items: Mapping[str, Any], **fields: Any) -> Any:
        """A report of these records."""
        return self.ReportFederationRequest(items=[self.EnvCapacity(**item) for item in items], **fields)

    def broadcast(self, *items: Mapping[str, Any], **fields: Any) -> Any:
        """A broadcast of these records."""
        return self.FederationBroadcast(items=[self.EnvCapacity(**item) for item in items], **fields)


def record(cluster: str, pool: str = "p1", **values: Any) -> dict[str, Any]:
    """A member's record, as gRPC's messages take it."""
    return {"cluster_id": cluster, "namespace": "ns", "env_name": "env", "member_pool": pool, **values}


def as_bytes(message: Any) -> bytes:
    """The bytes of a message, or bytes as they are."""
    data: bytes = message if isinstance(message, bytes) else message.SerializeToString()
    return data


# --- a worker --------------------------------------------------------------------------------------------------------


class Refused(Exception):
    """A call that failed, with gRPC's own code and details."""

    def __init__(self, error: grpc.RpcError) -> None:
        self.code: grpc.StatusCode = error.code()
        self.details: str = error.details()
        super().__init__(f"{self.code.name}: {self.details}")


class Report:
    """A running report of a worker."""

    def __init__(self, worker: Worker) -> None:
        self._messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
        call = worker.channel.stream_unary(
            f"/{SERVICE}/ReportFederation",
            request_serializer=as_bytes,
            response_deserializer=worker.schema.ReportFederationResponse.FromString,
        )
        self._future = call.future(iter(self._messages.get, None), timeout=TIMEOUT, metadata=worker.metadata)

    def send(self, *messages: Any) -> None:
        """Send messages, whenever there is room for them."""
        for message in messages:
            self._messages.put(message)

    def end(self) -> None:
        """Say that this was all."""
        self._messages.put(None)

    async def answer(self) -> Any:
        """The hub's answer. Raises Refused."""
        return await trio.to_thread.run_sync(_result_of, self._future.result)

    def close(self) -> None:
        """Give it up, if it has not ended."""
        self._future.cancel()
        # For the thread that waits for the next message to send.
        self._messages.put(None)


class Watch:
    """A running watch of a worker."""

    def __init__(self, worker: Worker, request: Any) -> None:
        call = worker.channel.unary_stream(
            f"/{SERVICE}/WatchFederation",
            request_serializer=as_bytes,
            response_deserializer=worker.schema.FederationBroadcast.FromString,
        )
        self._call = call(request, timeout=TIMEOUT, metadata=worker.metadata)

    async def next(self) -> Any:
        """The next broadcast. Raises Refused."""
        return await trio.to_thread.run_sync(_result_of, partial(next, self._call))

    def cancel(self) -> None:
        """Give it up."""
        self._call.cancel()

    close = cancel


def _result_of(function: Callable[[], Any]) -> Any:
    try:
        return function()
    except grpc.RpcError as error:
        raise Refused(error) from error


class Worker:
    """One cluster's agent, in another implementation. Use as a context manager, around everything that it does."""

    def __init__(
        self,
        schema: Schema,
        port: int,
        cluster: str | None,
        *,
        secret: str | None = SECRET,
        instance: str | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        metadata: Sequence[tuple[str, str]] = (),
        compression: grpc.Compression | None = None,
    ) -> None:
        self.schema = schema
        self.metadata = list(metadata)
        if secret is not None:
            self.metadata.append(("authorization", f"Bearer {secret}"))
        if cluster is not None:
            self.metadata.append(("x-federation-cluster", cluster))
        if instance is not None:
            self.metadata.append(("x-federation-instance", instance))
        # A channel of its own for every worker: grpcio would let them share a connection.
        options = [*NO_LIMITS, ("grpc.use_local_subchannel_pool", 1)]
        if credentials is None:
            self.channel = grpc.insecure_channel(f"127.0.0.1:{port}", options, compression)
        else:
            self.channel = grpc.secure_channel(f"127.0.0.1:{port}", credentials, options, compression)
        self._calls: list[Report | Watch] = []

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        for call in self._calls:
            call.close()
        self.channel.close()

    def report(self, *messages: Any) -> Report:
        """Open a report, and send messages on it."""
        call = Report(self)
        self._calls.append(call)
        call.send(*messages)
        return call

    def watch(self, **request: Any) -> Watch:
        """Open a watch."""
        call = Watch(self, self.schema.WatchFederationRequest(**request))
        self._calls.append(call)
        return call


# --- a hub -----------------------------------------------------------------------------------------------------------


class BrokenOff:
    """Stands for the end of a report that no agent has said."""


class HubReport:
    """A report that an agent makes to a hub of another implementation."""

    def __init__(self, metadata: Mapping[str, str]) -> None:
        self.metadata = metadata
        self._put, self._messages = trio.open_memory_channel[Any](math.inf)

    def put(self, message: Any) -> None:
        """Called in Trio's thread, for each message. One without records, with which an agent begins, only tells its
        time, and is nothing to a hub that does not look for that."""
        if getattr(message, "items", True):
            self._put.send_nowait(message)

    async def next(self) -> Any:
        """The next message; None where the agent has ended the report, BrokenOff where it is gone."""
        with trio.fail_after(PATIENCE):
            return await self._messages.receive()

    async def rest(self) -> list[Any]:
        """What comes until the end, and the end itself."""
        rest = [await self.next()]
        while rest[-1] is not None and rest[-1] is not BrokenOff:
            rest.append(await self.next())
        return rest


class HubWatch:
    """A watch that an agent makes of a hub of another implementation."""

    def __init__(self, metadata: Mapping[str, str], request: Any) -> None:
        self.metadata = metadata
        self.request = request
        #: set when the agent has ended it
        self.ended = trio.Event()
        self.broadcasts: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def send(self, *broadcasts: Any) -> None:
        """Send broadcasts; None ends the call."""
        for broadcast in broadcasts:
            self.broadcasts.put(broadcast)


class GrpcHub:
    """A hub in another implementation, with gRPC's default settings, that takes everything and does what it is told.

    `watch`: whether it has that method. `port`: 0 takes a free one."""

    def __init__(
        self,
        schema: Schema,
        *,
        port: int = 0,
        watch: bool = True,
        credentials: grpc.ServerCredentials | None = None,
    ) -> None:
        self.schema = schema
        #: with what the next reports are refused, one each
        self.refusals: queue.SimpleQueue[tuple[grpc.StatusCode, str]] = queue.SimpleQueue()
        self._token = trio.lowlevel.current_trio_token()
        self._put_report, self._reports = trio.open_memory_channel[HubReport](math.inf)
        self._put_watch, self._watches = trio.open_memory_channel[HubWatch](math.inf)
        self._executor = futures.ThreadPoolExecutor(16)
        self._server = grpc.server(self._executor, options=NO_LIMITS)
        methods = {
            "ReportFederation": grpc.stream_unary_rpc_method_handler(
                self._report, schema.ReportFederationRequest.FromString, as_bytes
            )
        }
        if watch:
            methods["WatchFederation"] = grpc.unary_stream_rpc_method_handler(
                self._watch, schema.WatchFederationRequest.FromString, as_bytes
            )
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))
        address = f"127.0.0.1:{port}"
        self.port: int = (
            self._server.add_insecure_port(address)
            if credentials is None
            else self._server.add_secure_port(address, credentials)
        )

    async def __aenter__(self) -> GrpcHub:
        self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        with trio.CancelScope(shield=True):
            await self.stop()

    async def stop(self) -> None:
        """End every call, and the server."""
        await trio.to_thread.run_sync(self._server.stop(None).wait, TIMEOUT)
        await trio.to_thread.run_sync(self._executor.shutdown)

    async def next_report(self) -> HubReport:
        """The next report call that comes in."""
        with trio.fail_after(PATIENCE):
            return await self._reports.receive()

    async def next_watch(self) -> HubWatch:
        """The next watch call that comes in."""
        with trio.fail_after(PATIENCE):
            return await self._watches.receive()

    # In gRPC's threads.

    def _tell(self, function: Callable[..., object], *args: Any) -> None:
        with suppress(trio.RunFinishedError):
            self._token.run_sync_soon(function, *args)

    def _report(self, messages: Iterator[Any], context: grpc.ServicerContext) -> Any:
        call = HubReport(dict(context.invocation_metadata()))
        self._tell(self._put_report.send_nowait, call)
        if not self.refusals.empty():
            context.abort(*self.refusals.get())
        try:
            for message in messages:
                self._tell(call.put, message)
        except Exception:  # grpcio raises a bare one where the call is broken off
            self._tell(call.put, BrokenOff)
            raise
        self._tell(call.put, None)
        return self.schema.ReportFederationResponse()

    def _watch(self, request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        call = HubWatch(dict(context.invocation_metadata()), request)

        def end() -> None:
            call.broadcasts.put(None)
            self._tell(call.ended.set)

        if not context.add_callback(end):  # it has ended already
            end()
        self._tell(self._put_watch.send_nowait, call)
        while (broadcast := call.broadcasts.get()) is not None:
            yield broadcast


# --- what we log -----------------------------------------------------------------------------------------------------


class LogWatch:
    """What is logged, as structlog's loggers say it; "at" is trio's time."""

    def __init__(self) -> None:
        self.entries: list[Mapping[str, Any]] = []
        self._changed = trio.Event()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Take the place of whatever logs go to."""
        before = structlog.get_config()
        structlog.configure(processors=[self._take])
        try:
            yield
        finally:
            structlog.configure(**before)

    def _take(self, logger: Any, method: str, entry: Mapping[str, Any]) -> Mapping[str, Any]:
        # Only loggers in Trio's thread are listened to.
        self.entries.append({**entry, "level": method, "at": trio.current_time()})
        self._changed.set()
        self._changed = trio.Event()
        raise structlog.DropEvent

    def of(self, event: str) -> list[Mapping[str, Any]]:
        """The entries of one kind."""
        return [entry for entry in self.entries if entry["event"] == event]

    async def wait_for(self, event: str, count: int = 1) -> Mapping[str, Any]:
        """The entry of a kind that is the `count`th."""
        with trio.fail_after(PATIENCE):
            while len(self.of(event)) < count:
                await self._changed.wait()
        return self.of(event)[count - 1]
