"""The flags of `edgellm-serve` that `llm_inference` does not have."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from edgellm.core.cli import with_flags
from edgellm.device_runtime.request_files.flags import AllowSpecialTokens, Verify
from edgellm.device_runtime.validation import MAX_STALL_MS

Host = Annotated[
    str, typer.Option("--host", help="Listen on this address.", rich_help_panel="Server")
]
Port = Annotated[
    int,
    typer.Option(
        "--port",
        min=0,
        max=65535,
        help="Listen on this port; 0 takes a free one.",
        rich_help_panel="Server",
    ),
]
GrpcPort = Annotated[
    int | None,
    typer.Option(
        "--grpcPort",
        min=0,
        max=65535,
        help="Serve KServe's gRPC on this port. Default: no gRPC.",
        rich_help_panel="Server",
    ),
]
EngineDirs = Annotated[
    list[str],
    typer.Option(
        "--engineDir",
        metavar="[NAME=]DIR",
        help="Serve the engine in this folder, which llm_build made; repeat it for further "
        "engines, which are loaded on demand.",
        rich_help_panel="Model",
    ),
]
MultimodalEngineDirs = Annotated[
    list[str] | None,
    typer.Option(
        "--multimodalEngineDir",
        metavar="[NAME=]DIR",
        help="Encode images with the engine in this folder, which visual_build made; without "
        "NAME it is for the first engine. Default: text only.",
        rich_help_panel="Model",
    ),
]
AudioEngineDirs = Annotated[
    list[str] | None,
    typer.Option(
        "--audioEngineDir",
        metavar="[NAME=]DIR",
        help="Encode audio with the engine in this folder, which audio_build made; without "
        "NAME it is for the first engine. Default: no audio.",
        rich_help_panel="Model",
    ),
]
MemoryBudget = Annotated[
    float,
    typer.Option(
        "--memoryBudget",
        min=0.001,
        help="Limit the memory of loaded engines, in GB; the least recently used one is "
        "unloaded. Default: no limit.",
        rich_help_panel="Limits",
    ),
]
MetricsPort = Annotated[
    int | None,
    typer.Option(
        "--metricsPort",
        min=0,
        max=65535,
        help="Serve /metrics on this port, too. Default: the main port only.",
        rich_help_panel="Server",
    ),
]
MeasuresEnergy = Annotated[
    bool,
    typer.Option(
        "--energy",
        help="Show the machine's joules and watts on /metrics: RAPL on x86, INA sensors on Jetson.",
        rich_help_panel="Server",
    ),
]
ApiKeyFile = Annotated[
    Path | None,
    typer.Option(
        "--apiKeyFile",
        help="Require one of the API keys in this file, one a line. Default: no key.",
        rich_help_panel="Server",
    ),
]
AllowNoKey = Annotated[
    bool,
    typer.Option(
        "--allowNoKey",
        help="Accept requests of other machines without a key.",
        rich_help_panel="Server",
    ),
]
ModelName = Annotated[
    str | None,
    typer.Option(
        "--modelName",
        help="Name the only engine in requests. Default: its folder's name.",
        rich_help_panel="Model",
    ),
]
SlotSavePath = Annotated[
    Path | None,
    typer.Option(
        "--slotSavePath",
        help="Save KV caches in this folder at exit, and load them at start. Default: no folder.",
        rich_help_panel="Output",
    ),
]
QueueSize = Annotated[
    int,
    typer.Option(
        "--queueSize",
        min=1,
        help="Let at most this many requests wait; more fail with status 429. Default: "
        "{default} requests.",
        rich_help_panel="Limits",
    ),
]
MaxStall = Annotated[
    float,
    typer.Option(
        "--maxStallMs",
        min=1,
        help="Limit a forward pass that prefills while other requests decode. Default: "
        "{default} ms.",
        rich_help_panel="Limits",
    ),
]
RequestTimeout = Annotated[
    float,
    typer.Option(
        "--requestTimeout",
        min=0.1,
        help="Limit the time of the engine for one request. Default: {default} s.",
        rich_help_panel="Limits",
    ),
]
TotalTimeout = Annotated[
    float,
    typer.Option(
        "--totalTimeout",
        min=0.1,
        help="Limit the time from a request's arrival to the last byte. Default: {default} s.",
        rich_help_panel="Limits",
    ),
]
DrainTimeout = Annotated[
    int,
    typer.Option(
        "--drainTimeout",
        min=0,
        help="Let running requests finish for this long after SIGTERM. Default: {default} s.",
        rich_help_panel="Limits",
    ),
]
MaxBodyBytes = Annotated[
    int | None,
    typer.Option(
        "--maxBodyBytes",
        min=1024,
        help="Limit the body of a request, in bytes. Default: 1 MiB, with images or audio 32 MiB.",
        rich_help_panel="Limits",
    ),
]
ImageFolders = Annotated[
    list[Path] | None,
    typer.Option(
        "--allowImageFolder",
        help="Accept file:// URLs of images and audio in this folder; repeatable. Default: none.",
        rich_help_panel="Server",
    ),
]
ImageHosts = Annotated[
    list[str] | None,
    typer.Option(
        "--allowImageHost",
        help="Accept http(s) URLs of images on this host; repeatable. Default: none.",
        rich_help_panel="Server",
    ),
]
LoraModules = Annotated[
    list[str] | None,
    typer.Option(
        "--loraModule",
        help="Load the LoRA adapter NAME=FOLDER for the first engine; repeatable. Default: none.",
        rich_help_panel="Model",
    ),
]
LoraFolders = Annotated[
    list[Path] | None,
    typer.Option(
        "--allowLoraFolder",
        help="Let clients load adapters in this folder; repeatable. Default: none.",
        rich_help_panel="Server",
    ),
]
AllowOrigins = Annotated[
    list[str] | None,
    typer.Option(
        "--allowOrigin",
        help="Accept web pages of this origin, or of all with *; repeatable. Default: none.",
        rich_help_panel="Server",
    ),
]
ContextReuse = Annotated[
    bool,
    typer.Option(
        "--contextReuse/--noContextReuse",
        help="Reuse the KV cache of equal prefixes of earlier requests and their outputs.",
        rich_help_panel="Limits",
    ),
]

ModelDefaults = Annotated[
    Literal["model", "none"],
    typer.Option(
        "--generationConfig",
        metavar="model/none",
        help="Take the defaults of requests from the model's generation_config.json, or with "
        "none from the protocols alone.",
        rich_help_panel="Sampling",
    ),
]
OverriddenDefaults = Annotated[
    str | None,
    typer.Option(
        "--overrideGenerationConfig",
        metavar="JSON",
        help="Take these defaults of requests before the model's, such as "
        '{"temperature": 0.6, "top_k": 20, "max_new_tokens": 512}. Default: none.',
        rich_help_panel="Sampling",
    ),
]

LogLevel = Annotated[
    Literal["debug", "info", "warning", "error"],
    typer.Option(
        "--logLevel",
        metavar="debug/info/warning/error",
        help="Log messages of this level and above; info has a line for each request, debug "
        "also for probes.",
        rich_help_panel="Output",
    ),
]
LogFormat = Annotated[
    Literal["text", "json"],
    typer.Option(
        "--logFormat",
        metavar="text/json",
        help="Write the log as text, or as a JSON object a line.",
        rich_help_panel="Output",
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeFlags:
    """Values of the flags of the command."""

    engine_dirs: EngineDirs
    multimodal_engine_dirs: MultimodalEngineDirs = None
    audio_engine_dirs: AudioEngineDirs = None
    memory_budget: MemoryBudget = math.inf
    host: Host = "127.0.0.1"
    port: Port = 8000
    grpc_port: GrpcPort = None
    metrics_port: MetricsPort = None
    energy: MeasuresEnergy = False
    api_key_file: ApiKeyFile = None
    allow_no_key: AllowNoKey = False
    model_name: ModelName = None
    queue_size: QueueSize = 32
    max_stall: MaxStall = MAX_STALL_MS
    request_timeout: RequestTimeout = 300.0
    total_timeout: TotalTimeout = 900.0
    drain_timeout: DrainTimeout = 60
    max_body_bytes: MaxBodyBytes = None
    image_folders: ImageFolders = None
    image_hosts: ImageHosts = None
    lora_modules: LoraModules = None
    lora_folders: LoraFolders = None
    allow_origins: AllowOrigins = None
    model_defaults: ModelDefaults = "model"
    overridden_defaults: OverriddenDefaults = None
    context_reuse: ContextReuse = True
    slot_save_path: SlotSavePath = None
    allow_special_tokens: AllowSpecialTokens = False
    verify: Verify = None
    log_level: LogLevel = "info"
    log_format: LogFormat = "text"


with_serve_flags = with_flags("flags", ServeFlags)
