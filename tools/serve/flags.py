"""The flags of `edgellm-serve` that `llm_inference` does not have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Host = Annotated[str, typer.Option("--host", help="Address to listen on.")]
Port = Annotated[int, typer.Option("--port", min=0, max=65535, help="Port; 0 takes a free one.")]
GrpcPort = Annotated[
    int | None,
    typer.Option("--grpcPort", min=0, max=65535, help="Port of KServe's gRPC. Default: no gRPC."),
]
EngineDirs = Annotated[
    list[str],
    typer.Option(
        "--engineDir",
        metavar="[NAME=]DIR",
        help="Folder of llm_build; repeatable; further engines are loaded on demand.",
    ),
]
MultimodalEngineDirs = Annotated[
    list[str] | None,
    typer.Option(
        "--multimodalEngineDir",
        metavar="[NAME=]DIR",
        help="Folder of visual_build, for images; without NAME for the first engine.",
    ),
]
MemoryBudget = Annotated[
    float,
    typer.Option(
        "--memoryBudget",
        min=0.001,
        show_default=False,
        help="GB for loaded engines; the least recently used is unloaded. Default: no limit.",
    ),
]
MetricsPort = Annotated[
    int | None,
    typer.Option("--metricsPort", min=0, max=65535, help="Extra port of /metrics. Default: none."),
]
ApiKeyFile = Annotated[
    Path | None,
    typer.Option("--apiKeyFile", help="File of API keys, one a line; requests need one of them."),
]
AllowNoKey = Annotated[
    bool, typer.Option("--allowNoKey", help="Accept other machines without a key.")
]
ModelName = Annotated[
    str | None,
    typer.Option("--modelName", help="Name of the only engine. Default: its folder's name."),
]
SlotSavePath = Annotated[
    Path | None,
    typer.Option("--slotSavePath", help="Folder of KV caches, saved at exit and loaded at start."),
]
QueueSize = Annotated[
    int, typer.Option("--queueSize", min=1, help="Maximum of waiting requests; more fail with 429.")
]
MaxStall = Annotated[
    float,
    typer.Option(
        "--maxStallMs",
        min=1,
        help="Maximum ms of a forward pass that prefills while others decode.",
    ),
]
RequestTimeout = Annotated[
    float, typer.Option("--requestTimeout", min=0.1, help="Engine seconds of one request.")
]
TotalTimeout = Annotated[
    float, typer.Option("--totalTimeout", min=0.1, help="Seconds from arrival to the last byte.")
]
DrainTimeout = Annotated[
    int, typer.Option("--drainTimeout", min=0, help="Seconds for requests to finish on SIGTERM.")
]
MaxBodyBytes = Annotated[
    int | None,
    typer.Option(
        "--maxBodyBytes", min=1024, help="Maximum body of a request. Default: 1 MiB, images 32 MiB."
    ),
]
ImageFolders = Annotated[
    list[Path] | None,
    typer.Option("--allowImageFolder", help="Accept file:// URLs in this folder; repeatable."),
]
ImageHosts = Annotated[
    list[str] | None,
    typer.Option("--allowImageHost", help="Accept http(s) URLs of this host; repeatable."),
]
LoraModules = Annotated[
    list[str] | None,
    typer.Option("--loraModule", help="NAME=FOLDER: LoRA adapter of the first engine; repeatable."),
]
LoraFolders = Annotated[
    list[Path] | None,
    typer.Option("--allowLoraFolder", help="Clients may load adapters in this folder; repeatable."),
]
AllowOrigins = Annotated[
    list[str] | None,
    typer.Option("--allowOrigin", help="Accept web pages of this origin, * of all; repeatable."),
]
ContextReuse = Annotated[
    bool,
    typer.Option(
        "--contextReuse/--noContextReuse",
        help="Reuse the KV cache of equal prefixes of earlier requests and their outputs.",
    ),
]
