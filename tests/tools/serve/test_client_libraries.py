"""Client libraries run as users run them: `client_scripts` has a script for each.

Each chats, streams, calls tools in a loop, gets structured output, and sends its own objects back.
openai, anthropic and ollama are in the dev extra. `make clients` installs the others and runs all
tests here; a test is skipped where its library is missing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).with_name("client_scripts")
CLIENTS = Path(__file__).parents[3] / ".venv-clients"
PYTHON = os.environ.get("EDGELLM_CLIENTS_PYTHON", sys.executable)
LIBRARIES = {
    "openai_client.py": "openai",
    "anthropic_client.py": "anthropic",
    "ollama_client.py": "ollama",
    "litellm_client.py": "litellm",
    "langchain_client.py": "langchain_openai",
    "instructor_client.py": "instructor",
    "pydantic_ai_client.py": "pydantic_ai",
    "llama_index_client.py": "llama_index.llms.openai_like",
}
FOUND = "import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)"
SECONDS = 400


def _run(command: list[object]) -> None:
    result = subprocess.run(
        [*map(str, command)], capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert result.returncode == 0, (result.stdout + result.stderr)[-3000:]


def _allow_ignored(server) -> None:
    """Some libraries send options without effect, which the server logs once."""
    for name in ("strict", "store", "context_management", "num_ctx"):
        server.expects(f"WARNING: requests have {name}, which is ignored; logged once")


@pytest.mark.parametrize("script", LIBRARIES)
def test_a_library_works_as_it_comes(lettered_server, script):
    library = LIBRARIES[script]
    root = library.partition(".")[0]
    if subprocess.run([PYTHON, "-c", FOUND, root], check=False).returncode:
        pytest.skip(f"{library} is not installed: make clients")
    _allow_ignored(lettered_server)
    _run([PYTHON, SCRIPTS / script, lettered_server.url])


def test_vercels_ai_sdk_works_as_it_comes(lettered_server):
    packages = CLIENTS / "package.json"
    if shutil.which("node") is None or not packages.exists():
        pytest.skip("the AI SDK is not installed: make clients")
    _allow_ignored(lettered_server)
    _run(["node", SCRIPTS / "ai_sdk.mjs", lettered_server.url, packages])
