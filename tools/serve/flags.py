"""The flags of `edgellm-serve` that `llm_inference` does not have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Host = Annotated[str, typer.Option("--host", help="Address to listen on.")]
Port = Annotated[int, typer.Option("--port", min=0, max=65535, help="0 takes a free one.")]
GrpcPort = Annotated[
    int | None,
    typer.Option("--grpcPort", min=0, max=65535, help="KServe's gRPC here, too, as Triton's 8001."),
]
EngineDirs = Annotated[
    list[str],
    typer.Option(
        "--engineDir",
        metavar="[NAME=]DIR",
        help="Folder made by llm_build; repeatable: further ones are loaded on demand.",
    ),
]
MultimodalEngineDirs = Annotated[
    list[str] | None,
    typer.Option(
        "--multimodalEngineDir",
        metavar="[NAME=]DIR",
        help="Folder made by visual_build, for images; without NAME of the first engine.",
    ),
]
MemoryBudget = Annotated[
    float,
    typer.Option(
        "--memoryBudget",
        min=0.001,
        show_default=False,
        help="GB that loaded engines may need together; whichever was idle longest makes way.",
    ),
]
MetricsPort = Annotated[
    int | None,
    typer.Option("--metricsPort", min=0, max=65535, help="/metrics here, too, as Triton's 8002."),
]
ApiKeyFile = Annotated[
    Path | None,
    typer.Option("--apiKeyFile", help="API keys, one a line; requests must carry one."),
]
AllowNoKey = Annotated[
    bool, typer.Option("--allowNoKey", help="Let other machines in without a key.")
]
ModelName = Annotated[
    str | None,
    typer.Option("--modelName", help="Name of the only engine; the folder's without it."),
]
SlotSavePath = Annotated[
    Path | None,
    typer.Option("--slotSavePath", help="Folder whose contexts outlast the server; made if new."),
]
QueueSize = Annotated[
    int, typer.Option("--queueSize", min=1, help="Requests that may wait; then 429.")
]
MaxStall = Annotated[
    float,
    typer.Option(
        "--maxStallMs",
        min=1,
        help="A pass that reads a prompt beside other answers takes no longer.",
    ),
]
RequestTimeout = Annotated[
    float, typer.Option("--requestTimeout", min=0.1, help="Seconds of the engine for a request.")
]
TotalTimeout = Annotated[
    float, typer.Option("--totalTimeout", min=0.1, help="Seconds from arrival to the last byte.")
]
DrainTimeout = Annotated[
    int, typer.Option("--drainTimeout", min=0, help="Seconds for answers to end on SIGTERM.")
]
MaxBodyBytes = Annotated[
    int | None,
    typer.Option(
        "--maxBodyBytes", min=1024, help="Of a request; 1 MiB without it, 32 MiB with images."
    ),
]
ImageFolders = Annotated[
    list[Path] | None,
    typer.Option("--allowImageFolder", help="Take file:// URLs into this folder; repeatable."),
]
ImageHosts = Annotated[
    list[str] | None,
    typer.Option("--allowImageHost", help="Take http(s) URLs of this host; repeatable."),
]
LoraModules = Annotated[
    list[str] | None,
    typer.Option("--loraModule", help="NAME=FOLDER: LoRA adapter of the first engine; repeatable."),
]
LoraFolders = Annotated[
    list[Path] | None,
    typer.Option("--allowLoraFolder", help="Clients may load adapters from within; repeatable."),
]
AllowOrigins = Annotated[
    list[str] | None,
    typer.Option("--allowOrigin", help="Let web pages of this origin in, * of all; repeatable."),
]
ContextReuse = Annotated[
    bool,
    typer.Option(
        "--contextReuse/--noContextReuse",
        help="Do not compute what a request has in common with the one before and its answer.",
    ),
]
