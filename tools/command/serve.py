"""`edgellm serve`: serve a model over HTTP."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgellm.core.cli import App, with_flags_of
from edgellm.core.commands.extras import require
from edgellm.core.errors import EdgeLLMError
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
        given = {**flags, **_speech_draft(found.engine, recipe_flags, flags)}
        own = given if any(given[name] for name in _DRAFTERS) else {**given, "spec": "auto"}
        edgellm_serve(**{**own, **engines, "model_name": flags["model_name"] or found.name})

    require("serve", *(("grpc",) if flags["grpc_port"] is not None else ()))
    use_model(app, model, recipe_flags, start)


def _speech_draft(engine: Path, recipe_flags: RecipeFlags, flags: dict[str, Any]) -> dict[str, Any]:
    """`draft_engine_dir` for a speech model whose `--draft` names another one; else {}."""
    from edgellm.core.manifest import LLM_ENGINE, load_engine

    draft = recipe_flags.draft
    if draft in ("auto", "none") or load_engine(engine, LLM_ENGINE).decoder.audio is None:
        return {}
    if any(flags[name] for name in _DRAFTERS):
        raise EdgeLLMError(
            f"--draft {draft} and another flag of speculation are given",
            hint="a speech model has one draft: leave one of them out",
        )
    own = replace(recipe_flags, draft="auto", context=None)
    return {"draft_engine_dir": use_model(app, draft, own, lambda found: found.engine)}
