"""`edgellm bench`: measure the speed of a model."""

from __future__ import annotations

from typing import Any

from edgellm.core.cli import App, with_flags_of
from edgellm.tools.bench.cli import bench as edgellm_bench
from edgellm.tools.command.flags import Model, RecipeFlags, use_model, with_recipe_flags

app = App()


@app.command(
    name="bench",
    common=("model", "--prompt", "--generate", "--spec", "--output"),
    examples=(
        "edgellm bench HuggingFaceTB/SmolLM2-135M-Instruct",
        "edgellm bench model.gguf --prompt 128,512 --generate 64 --spec auto",
    ),
)
@with_recipe_flags
@with_flags_of(edgellm_bench, "engine_dir")
def bench(model: Model, recipe_flags: RecipeFlags, flags: dict[str, Any]) -> None:
    """Measure the speed of a model; --spec auto compares with plain decoding."""
    use_model(
        app, model, recipe_flags, lambda found: edgellm_bench(engine_dir=found.engine, **flags)
    )
