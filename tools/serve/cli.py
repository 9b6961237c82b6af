"""`edgellm-serve`: serve engines over HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from edgellm.core.cli import App, run_command
from edgellm.core.commands.extras import remedy, require
from edgellm.core.errors import EdgeLLMError
from edgellm.device_runtime.request_files.spec_flags import SpecFlags, with_spec_flags
from edgellm.tools.serve.flags import ServeFlags, with_serve_flags

if TYPE_CHECKING:
    from socket import socket

    from edgellm.tools.serve import settings
    from edgellm.tools.serve.engines.models import Model
    from edgellm.tools.serve.routing.engine_pool import EnginePool

app = App()


@app.command(
    common=("--engineDir", "--host", "--port", "--apiKeyFile", "--spec"),
    examples=(
        "edgellm-serve --engineDir engine --port 8000",
        "edgellm-serve --engineDir engine --host 0.0.0.0 --apiKeyFile keys.txt --eagle",
    ),
)
@with_spec_flags
@with_serve_flags
def edgellm_serve(flags: ServeFlags, spec_flags: SpecFlags) -> None:
    """Serve engines over HTTP with OpenAI's and Triton's protocols."""
    how = spec_flags.read()
    require("serve")
    from edgellm.tools.energy import Meter, find_sensors
    from edgellm.tools.serve import heap, settings
    from edgellm.tools.serve.engines import models
    from edgellm.tools.serve.engines.loading import Loading
    from edgellm.tools.serve.http import cors, request_log
    from edgellm.tools.serve.protocols.openai import lora
    from edgellm.tools.serve.routing.engine_pool import EnginePool

    keys = settings.read_keys(flags.api_key_file) if flags.api_key_file is not None else frozenset()
    settings.require_safe(flags.host, has_keys=bool(keys), allow_no_key=flags.allow_no_key)
    draft, budget = how and how.draft_engine_dir, flags.memory_budget * models.BYTES_PER_GB
    given = models.read_models(
        flags.engine_dirs,
        flags.multimodal_engine_dirs or (),
        flags.model_name,
        draft,
        budget,
        audio=flags.audio_engine_dirs or (),
    )
    if any(model.is_speech for model in given):
        require("audio")
    wanted = settings.Settings(
        key_hashes=keys,
        local_only=settings.is_loopback(flags.host) and not keys,
        queue_size=flags.queue_size,
        request_timeout_s=flags.request_timeout,
        total_timeout_s=flags.total_timeout,
        max_body_bytes=flags.max_body_bytes or _body_bytes(given),
        origins=cors.read_origins(flags.allow_origins or ()),
        images=_image_rules(flags.image_folders, flags.image_hosts),
        memory_bytes=budget,
        lora_folders=_folders("--allowLoraFolder", flags.lora_folders),
    )
    loading = Loading(
        spec=how,
        context_reuse=flags.context_reuse,
        allow_special_tokens=flags.allow_special_tokens,
        verify=flags.verify,
        max_stall_ms=flags.max_stall,
        uses_model_defaults=flags.model_defaults == "model",
        defaults=settings.read_defaults(flags.overridden_defaults),
        contexts=flags.slot_save_path,
        has_own_folders=len(given) > 1,
    )
    heap.manage()
    sensors = find_sensors() if flags.energy else []
    loading.prepare(given)  # fails before an engine is loaded
    listeners = _listeners(flags.host, flags.port, flags.metrics_port, flags.grpc_port)
    engines = EnginePool(given, loading, wanted)
    lora.load_given(engines.begin(), flags.lora_modules or (), [model.name for model in given])
    if sensors:
        engines.registry.show_energy(Meter(sensors).start())
    request_log.configure(flags.log_level, flags.log_format)
    _run(engines, listeners, flags.grpc_port, flags.host, flags.drain_timeout)


def _body_bytes(given: Sequence[Model]) -> int:
    """Default limit of a request's body."""
    from edgellm.tools.serve.settings import MEDIA_BODY_BYTES, TEXT_BODY_BYTES

    has_media = any(model.visual or model.audio or model.is_speech for model in given)
    return MEDIA_BODY_BYTES if has_media else TEXT_BODY_BYTES


def _image_rules(folders: list[Path] | None, hosts: list[str] | None) -> settings.ImageRules:
    from edgellm.tools.serve.settings import ImageRules

    names = frozenset(map(str.lower, hosts or ()))
    return ImageRules(_folders("--allowImageFolder", folders), names)


def _listeners(
    host: str, port: int, metrics_port: int | None, grpc_port: int | None
) -> tuple[socket, socket | None]:
    """Sockets of requests and metrics; also checks that gRPC is available."""
    from edgellm.tools.serve import server

    listener, figures = server.listen(host, port), None
    if metrics_port is not None:
        figures = server.listen(host, metrics_port, flag="--metricsPort")
    if grpc_port is not None:
        server.listen(host, grpc_port, flag="--grpcPort").close()
        _require_grpc()
    return listener, figures


def _run(
    engines: EnginePool,
    listeners: tuple[socket, socket | None],
    grpc_port: int | None,
    host: str,
    drain_timeout_s: int,
) -> None:
    from edgellm.tools.serve.app import create_app, create_metrics_app
    from edgellm.tools.serve.server import CompanionServer, MetricsServer, serve

    listener, figures = listeners
    shown = f"[{host}]" if ":" in host else host
    url = f"http://{shown}:{listener.getsockname()[1]}"
    app = create_app(engines)
    companions: list[CompanionServer] = []
    if grpc_port is not None:
        from edgellm.tools.serve.protocols.kserve.rpc import GrpcServer

        companions.append(
            GrpcServer(engines=engines, host=host, port=grpc_port, version=app.version)
        )
    if figures is not None:
        companions.append(MetricsServer(create_metrics_app(engines), figures))
    names = [place.model.name for place in engines.places]
    verb = "answers" if len(names) == 1 else "answer"

    def greet(others: Sequence[str]) -> None:
        parts = [f"{', '.join(names)} {verb} at {url}/v1", *others]
        typer.echo(", ".join(parts) + "; Ctrl-C ends it")

    serve(app, engines, listener, greet, drain_timeout_s=drain_timeout_s, companions=companions)
    typer.echo("stopped")


def _require_grpc() -> None:
    if find_spec("grpc") is None:
        raise EdgeLLMError(
            "--grpcPort needs grpcio, which is not installed",
            hint=remedy("grpc"),
        )


def _folders(flag: str, paths: list[Path] | None) -> tuple[Path, ...]:
    for path in paths or ():
        if not path.is_dir():
            raise EdgeLLMError(f"{flag} {path} is not a folder")
    return tuple(path.resolve() for path in paths or ())


def main() -> None:
    """Entry point."""
    run_command(app)
