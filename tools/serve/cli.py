"""`edgellm-serve`: answer requests over HTTP."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from edgellm.command import CAMEL_CASE, App, run_command
from edgellm.contract import EdgeLLMError
from edgellm.device_runtime.engine.arguments import MAX_STALL_MS
from edgellm.device_runtime.requests.flags import (
    AllowSpecialTokens,
    EngineDir,
    MultimodalEngineDir,
    Verify,
)
from edgellm.device_runtime.requests.spec_flags import SpecFlags, with_spec_flags
from edgellm.tools.serve.flags import (
    AllowNoKey,
    AllowOrigins,
    ApiKeyFile,
    ContextReuse,
    DrainTimeout,
    GrpcPort,
    Host,
    ImageFolders,
    ImageHosts,
    LoraFolders,
    LoraModules,
    MaxBodyBytes,
    MaxStall,
    MetricsPort,
    ModelName,
    Port,
    QueueSize,
    RequestTimeout,
    SlotSavePath,
    TotalTimeout,
)

if TYPE_CHECKING:
    from socket import socket

    from edgellm.device_runtime.engine.llm import LLM
    from edgellm.tools.serve.settings import Settings

app = App(CAMEL_CASE)


@app.command()
@with_spec_flags
def edgellm_serve(
    engine_dir: EngineDir,
    spec_flags: SpecFlags,
    multimodal_engine_dir: MultimodalEngineDir = None,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    grpc_port: GrpcPort = None,
    metrics_port: MetricsPort = None,
    api_key_file: ApiKeyFile = None,
    allow_no_key: AllowNoKey = False,
    model_name: ModelName = None,
    queue_size: QueueSize = 32,
    max_stall: MaxStall = MAX_STALL_MS,
    request_timeout: RequestTimeout = 300.0,
    total_timeout: TotalTimeout = 900.0,
    drain_timeout: DrainTimeout = 60,
    max_body_bytes: MaxBodyBytes = None,
    image_folders: ImageFolders = None,
    image_hosts: ImageHosts = None,
    lora_modules: LoraModules = None,
    lora_folders: LoraFolders = None,
    allow_origins: AllowOrigins = None,
    context_reuse: ContextReuse = True,
    slot_save_path: SlotSavePath = None,
    allow_special_tokens: AllowSpecialTokens = False,
    verify: Verify = None,
) -> None:
    """Answer OpenAI's and Triton's requests over HTTP."""
    how = spec_flags.read()
    from edgellm.tools.serve import kept_contexts, settings, sites

    keys = settings.read_keys(api_key_file) if api_key_file is not None else frozenset()
    settings.require_safe(host, has_keys=bool(keys), allow_no_key=allow_no_key)
    with_images = multimodal_engine_dir is not None
    most = settings.IMAGE_BODY_BYTES if with_images else settings.TEXT_BODY_BYTES
    wanted = settings.Settings(
        model_name or engine_dir.resolve().name, keys, settings.is_loopback(host) and not keys,
        queue_size, request_timeout, total_timeout, max_body_bytes=max_body_bytes or most,
        origins=sites.read_origins(allow_origins or ()),
        images=settings.ImageRules(
            _folders("--allowImageFolder", image_folders),
            frozenset(map(str.lower, image_hosts or ())),
        ),
        lora_folders=_folders("--allowLoraFolder", lora_folders),
    )  # fmt: skip
    from edgellm.tools.serve import adapters, asks

    engines = (engine_dir, multimodal_engine_dir, how and how.draft_engine_dir)
    contexts = kept_contexts.prepared(slot_save_path, *engines, reuses=context_reuse)
    # What stands in the way is told before the engine is loaded.
    listeners = _listeners(host, port, metrics_port, grpc_port)
    llm = asks.load(
        engine_dir, multimodal_engine_dir, how,
        context_reuse=context_reuse, allow_special_tokens=allow_special_tokens, verify=verify,
        max_stall_ms=max_stall,
    )  # fmt: skip
    adapters.load_given(llm, lora_modules or (), wanted.model)
    with kept_contexts.outlasting(contexts, llm):
        _run(llm, wanted, listeners, grpc_port, host, drain_timeout)


def _listeners(
    host: str, port: int, metrics_port: int | None, grpc_port: int | None
) -> tuple[socket, socket | None]:
    """For requests and for figures; whether gRPC can be had is found out, too."""
    from edgellm.tools.serve import server

    listener, figures = server.listen(host, port), None
    if metrics_port is not None:
        figures = server.listen(host, metrics_port, flag="--metricsPort")
    if grpc_port is not None:
        server.listen(host, grpc_port, flag="--grpcPort").close()
        _require_grpc()
    return listener, figures


def _run(
    llm: LLM,
    settings: Settings,
    listeners: tuple[socket, socket | None],
    grpc_port: int | None,
    host: str,
    drain_timeout_s: int,
) -> None:
    from edgellm.tools.serve.app import create_app, create_metrics_app
    from edgellm.tools.serve.metrics import Metrics
    from edgellm.tools.serve.server import Companion, MetricsServer, serve
    from edgellm.tools.serve.worker import Worker

    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING)
    metrics = Metrics(settings.model)
    worker = Worker(llm, metrics, settings.queue_size, settings.request_timeout_s)
    listener, figures = listeners
    shown = f"[{host}]" if ":" in host else host
    url = f"http://{shown}:{listener.getsockname()[1]}"
    app = create_app(worker, metrics, settings)
    beside: list[Companion] = []
    if grpc_port is not None:
        from edgellm.tools.serve.kserve.rpc import GrpcServer

        beside.append(GrpcServer(app.state.server, host, grpc_port, app.version))
    if figures is not None:
        beside.append(MetricsServer(create_metrics_app(app.state.server), figures))

    def greet(others: Sequence[str]) -> None:
        typer.echo(
            ", ".join([f"{settings.model} answers at {url}/v1", *others]) + "; Ctrl-C ends it"
        )

    serve(app, worker, listener, greet, drain_timeout_s=drain_timeout_s, beside=beside)
    typer.echo("stopped")


def _require_grpc() -> None:
    if find_spec("grpc") is None:
        raise EdgeLLMError(
            "--grpcPort needs grpcio, which is not installed",
            hint="in edgellm's folder: pip install '.[device,serve,grpc]'",
        )


def _folders(flag: str, paths: list[Path] | None) -> tuple[Path, ...]:
    for path in paths or ():
        if not path.is_dir():
            raise EdgeLLMError(f"{flag} {path} is not a folder")
    return tuple(path.resolve() for path in paths or ())


def main() -> None:
    """Entry point."""
    run_command(app)
