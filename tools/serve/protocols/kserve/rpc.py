"""KServe's gRPC service, with the same engines as HTTP."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import ExitStack
from typing import Any

import grpc  # pyright: ignore[reportMissingModuleSource]
from starlette.types import Message

from edgellm.core.errors import EdgeLLMError
from edgellm.device_runtime.api.llm import Step
from edgellm.tools.serve import heap
from edgellm.tools.serve.auth import require_key
from edgellm.tools.serve.engines.events import Finished
from edgellm.tools.serve.engines.request_stream import BODY_BYTES, Call
from edgellm.tools.serve.http.errors import ApiError, as_api_error
from edgellm.tools.serve.http.request_log import REQUEST_FACTS, LoggedCall, RequestFacts
from edgellm.tools.serve.output.streams import collect
from edgellm.tools.serve.protocols.kserve import infer, metadata
from edgellm.tools.serve.protocols.kserve.messages import MESSAGES, SERVICE
from edgellm.tools.serve.protocols.kserve.tensors import (
    OUTPUTS,
    Tensor,
    read,
    read_bytes,
    text_bytes,
)
from edgellm.tools.serve.protocols.triton.generate import GenerateRequest, GenerateWriter
from edgellm.tools.serve.routing.engine_pool import LEASES, EnginePool

_log = logging.getLogger(__name__)
_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    404: grpc.StatusCode.NOT_FOUND,
    422: grpc.StatusCode.DEADLINE_EXCEEDED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
_PROBES = ("ServerLive", "ServerReady")
_STREAM = "ModelStreamInfer"
_FINAL, _WANTS_FINAL = "triton_final_response", "triton_enable_empty_final_response"
# Datatype -> field of `InferTensorContents`
_CONTENTS = {
    "BOOL": "bool_contents", "INT8": "int_contents", "INT16": "int_contents",
    "INT32": "int_contents", "INT64": "int64_contents", "UINT8": "uint_contents",
    "UINT16": "uint_contents", "UINT32": "uint_contents", "UINT64": "uint64_contents",
    "FP32": "fp32_contents", "FP64": "fp64_contents", "BYTES": "bytes_contents",
}  # fmt: skip


_Call = Callable[[Any, RequestFacts], Awaitable[Any]]


class _Connection:
    """`Connection` of a gRPC client: gRPC cancels the task when the client disconnects."""

    scope: dict[str, Any]

    def __init__(self, leases: ExitStack, num_bytes: int, facts: RequestFacts) -> None:
        """`leases` ends with the request; the message has `num_bytes`; the log has `facts`."""
        self.scope = {LEASES: leases, BODY_BYTES: num_bytes, REQUEST_FACTS: facts}

    async def receive(self) -> Message:
        """Never returns."""
        await asyncio.Event().wait()
        raise AssertionError


class Service:
    """The methods of the service; each is a coroutine of a request."""

    def __init__(self, engines: EnginePool, version: str) -> None:
        self._engines, self._version = engines, version
        self.ending = asyncio.Event()  # streams accept no further request

    def handler(self) -> grpc.GenericRpcHandler:
        """The handler for a gRPC server."""
        unary: dict[str, Callable[[Any], Awaitable[Any]]] = {
            "ServerLive": self._live,
            "ServerReady": self._ready,
            "ModelReady": self._model_ready,
            "ServerMetadata": self._metadata,
            "ModelMetadata": self._model_metadata,
            "ModelConfig": self._config,
        }
        logged = {name: _without_facts(call) for name, call in unary.items()}
        logged["ModelInfer"] = self._infer
        made = {
            name: grpc.unary_unary_rpc_method_handler(
                self._checked(name, call),
                MESSAGES[f"{name}Request"].FromString,
                MESSAGES[f"{name}Response"].SerializeToString,
            )
            for name, call in logged.items()
        }
        made[_STREAM] = grpc.stream_stream_rpc_method_handler(
            self._stream,
            MESSAGES["ModelInferRequest"].FromString,
            MESSAGES["ModelStreamInferResponse"].SerializeToString,
        )
        return grpc.method_handlers_generic_handler(SERVICE, made)

    def _checked(
        self, name: str, call: _Call
    ) -> Callable[[Any, grpc.aio.ServicerContext], Awaitable[Any]]:
        async def checked(request: Any, context: grpc.aio.ServicerContext) -> Any:
            with _logged(name) as logged:
                try:
                    if name not in _PROBES:
                        self._require_key(context)
                    return await call(request, logged.facts)
                except (ApiError, EdgeLLMError) as error:
                    failed = as_api_error(error)
                except Exception as error:  # noqa: BLE001 - the server outlives every request
                    _log.exception("a request failed")
                    failed = as_api_error(error)
                finally:
                    heap.after_request(request.ByteSize())
                code = _code(failed)
                logged.status = code.name
            return await context.abort(code, _line(failed))

        return checked

    def _require_key(self, context: grpc.aio.ServicerContext) -> None:
        given = {key: value for key, value in context.invocation_metadata() or ()}  # noqa: C416
        require_key(self._engines.settings, str(given.get("authorization", "")))

    async def _live(self, request: Any) -> Any:
        del request
        return MESSAGES["ServerLiveResponse"](live=self._engines.is_alive)

    async def _ready(self, request: Any) -> Any:
        del request
        return MESSAGES["ServerReadyResponse"](ready=self._engines.is_ready)

    async def _model_ready(self, request: Any) -> Any:
        self._engines.find(request.name)
        return MESSAGES["ModelReadyResponse"](ready=self._engines.is_ready)

    async def _metadata(self, request: Any) -> Any:
        del request
        return MESSAGES["ServerMetadataResponse"](**metadata.server(self._version))

    async def _model_metadata(self, request: Any) -> Any:
        self._engines.find(request.name)
        return MESSAGES["ModelMetadataResponse"](**metadata.model(request.name))

    async def _config(self, request: Any) -> Any:
        self._engines.find(request.name)
        return MESSAGES["ModelConfigResponse"](config=metadata.config(request.name))

    async def _infer(self, request: Any, facts: RequestFacts) -> Any:
        body, names = self._read(request)
        body.require_path(streams=False)
        with ExitStack() as leases:
            connection = _Connection(leases, request.ByteSize(), facts)
            call, writer = await self._submit(request, body, connection, streams=False)
            return _response(request, names, await collect(call, writer))

    async def _stream(
        self, requests: AsyncIterator[Any], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[Any]:
        """Serve requests one by one; an error ends the request, not the stream."""
        made = MESSAGES["ModelStreamInferResponse"]
        try:
            self._require_key(context)
        except ApiError as error:
            with _logged(_STREAM) as logged:
                logged.status = grpc.StatusCode.UNAUTHENTICATED.name
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, _line(error))
        async for request in _until(self.ending, requests):
            with _logged(_STREAM) as logged:
                try:
                    async for response in self._answers(request, logged.facts):
                        yield made(infer_response=response)
                except (ApiError, EdgeLLMError) as error:
                    yield _failed(request, as_api_error(error), logged)
                except Exception as error:  # noqa: BLE001 - the server outlives every request
                    _log.exception("a request failed")
                    yield _failed(request, as_api_error(error), logged)
                finally:
                    heap.after_request(request.ByteSize())

    async def _answers(self, request: Any, facts: RequestFacts) -> AsyncIterator[Any]:
        """Yield one response for each step of a stream, or one with the whole text."""
        body, names = self._read(request)
        with ExitStack() as leases:
            streams = bool(body.stream or body.streaming)
            connection = _Connection(leases, request.ByteSize(), facts)
            call, writer = await self._submit(request, body, connection, streams=streams)
            answers = self._steps if streams else self._whole
            async for response in answers(request, names, body, call, writer):
                yield response

    async def _whole(
        self,
        request: Any,
        names: Sequence[str],
        body: GenerateRequest,
        call: Call,
        writer: GenerateWriter,
    ) -> AsyncIterator[Any]:
        del body
        found = await collect(call, writer)
        is_final = True if request.parameters[_WANTS_FINAL].bool_param else None
        yield _response(request, names, found, is_final=is_final)

    async def _steps(
        self,
        request: Any,
        names: Sequence[str],
        body: GenerateRequest,
        call: Call,
        writer: GenerateWriter,
    ) -> AsyncIterator[Any]:
        wants_final = request.parameters[_WANTS_FINAL].bool_param
        is_final = False if wants_final else None
        try:
            pieces = writer.begin()
            async for events in call:
                for event in events:
                    if isinstance(event, Step):
                        pieces += writer.step(event)
                    elif isinstance(event, Finished) and body.return_finish_reason:
                        pieces += writer.end(event)
                for piece in pieces:
                    yield _response(request, names, piece, is_final=is_final)
                pieces = []
        finally:
            call.close()
        if wants_final:
            yield _response(request, (), {}, is_final=True)

    def _read(self, request: Any) -> tuple[GenerateRequest, tuple[str, ...]]:
        """Parse a request: its body and the requested outputs.

        Raises:
            ApiError: the request is invalid.
        """
        self._engines.find(request.model_name)
        infer.require_parameters(request.parameters, infer.RequestParameters)
        for tensor in request.inputs:
            infer.require_parameters(tensor.parameters, infer.InputParameters)
        for output in request.outputs:
            infer.require_parameters(output.parameters, infer.OutputParameters)
        names = infer.require_outputs([output.name for output in request.outputs])
        body = infer.requested(_tensors(request), request.id)
        return infer.with_reason(body, names), names

    async def _submit(
        self, request: Any, body: GenerateRequest, connection: _Connection, *, streams: bool
    ) -> tuple[Call, GenerateWriter]:
        """Queues a request; returns it and its writer; raises as `Call`."""
        self._engines.require_room()
        served = await self._engines.of(request.model_name, connection)
        writer = GenerateWriter(body, served.name, streams=streams)
        asks = [body.ask(served.llm.defaults, served.lora)]
        return served.call(asks, connection), writer


class GrpcServer:
    """gRPC server at its own port, in the loop of the HTTP server."""

    def __init__(self, *, engines: EnginePool, host: str, port: int, version: str) -> None:
        self._max_bytes = engines.settings.max_body_bytes
        self._service = Service(engines, version)
        self._address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._grpc: grpc.aio.Server | None = None

    async def start(self) -> str:
        """Start to listen; return a line for the log.

        Raises:
            EdgeLLMError: the port is taken.
        """
        options = [("grpc.max_receive_message_length", self._max_bytes), ("grpc.so_reuseport", 0)]
        self._grpc = grpc.aio.server(options=options)
        self._grpc.add_generic_rpc_handlers((self._service.handler(),))
        try:
            port = self._grpc.add_insecure_port(self._address)
        except RuntimeError:
            port = 0
        if not port:
            raise EdgeLLMError(f"cannot listen on {self._address}", hint="give another --grpcPort")
        await self._grpc.start()
        return f"gRPC at {self._address.rpartition(':')[0]}:{port}"

    async def stop(self, max_seconds: float) -> None:
        """End when running requests have finished, or after `max_seconds`."""
        self._service.ending.set()
        if self._grpc is not None:
            await self._grpc.stop(max_seconds)


async def _until(ending: asyncio.Event, requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    """Yield requests of a stream until it or the server ends."""
    end = asyncio.create_task(ending.wait())
    try:
        while True:
            following = asyncio.ensure_future(anext(requests, None))
            done, _ = await asyncio.wait({following, end}, return_when=asyncio.FIRST_COMPLETED)
            if following not in done:
                following.cancel()
                return
            if (request := following.result()) is None:
                return
            yield request
    finally:
        end.cancel()


def _tensors(request: Any) -> list[Tensor]:
    raw = list(request.raw_input_contents)
    if raw and len(raw) != len(request.inputs):
        raise ApiError(400, f"{len(raw)} raw_input_contents for {len(request.inputs)} inputs")
    if raw:
        return [
            read_bytes(one.name, one.datatype, one.shape, content)
            for one, content in zip(request.inputs, raw, strict=True)
        ]
    return [
        read(
            one.name,
            one.datatype,
            one.shape,
            getattr(one.contents, _CONTENTS.get(one.datatype, "bytes_contents")),
        )
        for one in request.inputs
    ]


def _response(
    request: Any, names: Sequence[str], found: dict[str, Any], *, is_final: bool | None = None
) -> Any:
    """A response with those outputs `names` that are in `found`, as bytes."""
    present = [name for name in names if name in found]
    response = MESSAGES["ModelInferResponse"](
        model_name=request.model_name,
        model_version=metadata.VERSION,
        id=request.id,
        outputs=[{"name": name, "datatype": OUTPUTS[name], "shape": [1]} for name in present],
        raw_output_contents=[text_bytes(str(found[name])) for name in present],
    )
    if is_final is not None:
        response.parameters[_FINAL].bool_param = is_final
    return response


def _failed(request: Any, error: ApiError, logged: LoggedCall) -> Any:
    """The error of one request in a stream, with the request's id."""
    logged.status = _code(error).name
    response = MESSAGES["ModelInferResponse"](id=request.id)
    response.parameters[_FINAL].bool_param = True
    return MESSAGES["ModelStreamInferResponse"](error_message=_line(error), infer_response=response)


def _code(error: ApiError) -> grpc.StatusCode:
    return _CODES.get(error.status, grpc.StatusCode.INTERNAL)


def _logged(name: str) -> LoggedCall:
    return LoggedCall(f"/{SERVICE}/{name}", is_probe=name in _PROBES)


def _without_facts(call: Callable[[Any], Awaitable[Any]]) -> _Call:
    async def called(request: Any, facts: RequestFacts) -> Any:
        del facts  # of calls that generate
        return await call(request)

    return called


def _line(error: ApiError) -> str:
    return str(error).encode("utf-8", "backslashreplace").decode()
