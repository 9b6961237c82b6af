"""The one list of sampling options, from which files, protocols and flags derive theirs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import edgellm.device_runtime

ROOT = Path(edgellm.device_runtime.__file__).resolve().parents[1]
LAST = "    logit_bias: Mapping[int, float] = field("
NEW = '    dry_base: float = _option(0.0, "Base of the penalty DRY.", ge=0, le=4)\n'
# Prints the value that each way in gives to `SamplingParams`.
PROGRAM = """
import json
from typer.main import get_command
from edgellm.device_runtime.api.generation_request import GenerationDefaults
from edgellm.device_runtime.cli import app as inference
from edgellm.device_runtime.request_files.request_file import Options, parse_request, sampling_of
from edgellm.scripts.site.files import request_page
from edgellm.tools.chat.cli import app
from edgellm.tools.serve.protocols.anthropic.messages import MessagesRequest
from edgellm.tools.serve.protocols.kserve.tensors import INPUTS
from edgellm.tools.serve.protocols.ollama import Options as OllamaOptions
from edgellm.tools.serve.protocols.openai.responses import ResponsesRequest
from edgellm.tools.serve.protocols.triton.generate import GenerateRequest
from edgellm.tools.serve.schemas.openai import ChatRequest, CompletionRequest

messages = [{"role": "user", "content": "Hi"}]
chat = {"messages": messages, "dry_base": 1.5}
triton = [
    {"dry_base": 1.5}, {"parameters": {"dry_base": 1.5}}, {"sampling_param_dry_base": 1.5}
]
ollama = OllamaOptions.model_validate({"dry_base": 1.5}).sampled()
requests = {
    "chat": ChatRequest.model_validate(chat),
    "completion": CompletionRequest.model_validate({"prompt": "Hi", "dry_base": 1.5}),
    "anthropic": MessagesRequest.model_validate({"max_tokens": 1, **chat}).as_chat(),
    "responses": ResponsesRequest.model_validate({"input": "Hi", "dry_base": 1.5}).as_chat(),
    "ollama": ChatRequest.model_validate({"messages": messages, **ollama}),
}
found = {name: body.sampling(GenerationDefaults(), None, None) for name, body in requests.items()}
for at, body in enumerate(triton):
    request = GenerateRequest.model_validate({"text_input": "Hi", **body})
    found[f"triton {at}"] = request.ask(GenerationDefaults()).sampling
found["file"] = sampling_of(Options(dry_base=1.5))
found["request"] = sampling_of(parse_request(chat, 0).merged(Options()))
values = {name: one.dry_base for name, one in found.items()}
values["kserve"] = 1.5 if INPUTS["dry_base"] == "FP32" else None
for name, command in (("edgellm-chat", app), ("llm_inference", inference)):
    flags = [flag for one in get_command(command).params for flag in one.opts]
    values[name] = 1.5 if "--dryBase" in flags else None
defaults = GenerationDefaults.of({"dry_base": 1.5})
values["--overrideGenerationConfig"] = defaults.params({}).dry_base
values["docs"] = 1.5 if "Base of the penalty DRY." in request_page() else None
print(json.dumps(values))
"""


def test_a_new_option_is_in_every_protocol(tmp_path):
    """One line is added to a copy; all other files are links."""
    package = tmp_path / "edgellm"
    (package / "device_runtime" / "sampling").mkdir(parents=True)
    for copy, original in (
        (package, ROOT),
        (package / "device_runtime", ROOT / "device_runtime"),
        (package / "device_runtime" / "sampling", ROOT / "device_runtime" / "sampling"),
    ):
        for one in original.iterdir():
            if not (copy / one.name).exists() and not one.name.startswith((".", "__pycache__")):
                (copy / one.name).symlink_to(one)
    params = package / "device_runtime" / "sampling" / "params.py"
    text = params.read_text("utf-8")
    params.unlink()
    assert text.count(LAST) == 1
    params.write_text(text.replace(LAST, NEW + LAST), "utf-8")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    values = json.loads(done.stdout)
    assert len(values) == 15
    assert set(values.values()) == {1.5}
