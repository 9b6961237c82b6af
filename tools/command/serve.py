"""`edgellm serve`: serve a model over HTTP."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from edgellm.core.cli import App, with_flags_of
from edgellm.core.commands.extras import require
from edgellm.tools.command.flags import Model, RecipeFlags, use_model, with_recipe_flags
from edgellm.tools.serve.cli import edgellm_serve

if TYPE_CHECKING:
    from edgellm.tools.store.prepare import Prepared

app = App()
_DRAFTERS = ("spec", "eagle", "ngram", "suffix", "draft_engine_dir")  # flags


@app.command(
    name="serve",
    common=("model", "--host", "--port", "--apiKeyFile", "--draft"),
    examples=(
        "edgellm serve HuggingFaceTB/SmolLM2-135M-Instruct",
        "edgellm serve model.gguf --host 0.0.0.0 --apiKeyFile keys.txt",
    ),
)
@with_recipe_flags
@with_flags_of(edgellm_serve, "engine_dirs", "multimodal_engine_dirs", "audio_engine_dirs")
def serve(model: Model, recipe_flags: RecipeFlags, flags: dict[str, Any]) -> None:
    """Serve a model over HTTP with OpenAI's, Anthropic's, Ollama's and Triton's protocols.

    All flags of edgellm-serve are taken but those that name engines.
    """

    def start(found: Prepared) -> None:
        engines: dict[str, Any] = {"engine_dirs": [str(found.engine)]}
        if found.visual is not None:
            engines["multimodal_engine_dirs"] = [str(found.visual)]
        if found.audio is not None:
            engines["audio_engine_dirs"] = [str(found.audio)]
        own = flags if any(flags[name] for name in _DRAFTERS) else {**flags, "spec": "auto"}
        edgellm_serve(**{**own, **engines, "model_name": flags["model_name"] or found.name})

    require("serve", *(("grpc",) if flags["grpc_port"] is not None else ()))
    use_model(app, model, recipe_flags, start)
