"""A tiny engine with a draft and room for long answers, and a server of it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from eagle_engines import EAGLE3, export_pair
from lettered_engine import with_letters
from made_once import made_once
from manifests import read_manifest, write_manifest
from serve_process import ServerProcess, serving

from edgellm.build.engine import build_engine
from edgellm.build.plan import Plan
from edgellm.device_runtime import LLM

CAPACITY = 4096
MICROPHONE = ("--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream")
FIXED_TREES = (
    "--eagle", "--eagleTree", "fixed", "--eagleDraftTopK", 4, "--eagleDraftStep", 3,
    "--eagleVerifyTreeSize", 12,
)  # fmt: skip


@pytest.fixture(scope="session")
def roomy_engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_once(tmp_path_factory, "roomy", _make_roomy)


def _make_roomy(folder: Path) -> Path:
    pair = export_pair(folder, EAGLE3, max_position_embeddings=CAPACITY)
    base = Plan(
        max_input_len=1024,
        kv_capacity=CAPACITY,
        threads=1,
        prefill="same",
        quantize="none",
        max_verify_tree_size=60,
    )
    build_engine("llm", pair.bundle, pair.engine, base, "onnxruntime", lambda _: None)
    draft = Plan(
        max_input_len=1024,
        kv_capacity=CAPACITY,
        threads=1,
        prefill="auto",
        quantize="none",
        max_draft_tree_size=60,
    )
    build_engine("draft", pair.draft_bundle, pair.engine, draft, "onnxruntime", lambda _: None)
    # Without end tokens answers are as long as they are asked to be.
    content = read_manifest(pair.engine)
    assert content.pop("eos_token_ids") == [2]
    write_manifest(pair.engine, {**content, "eos_token_ids": []})
    return pair.engine


@pytest.fixture(scope="session")
def offline(roomy_engine: Path) -> LLM:
    """What the server must agree with."""
    return LLM(roomy_engine)


@pytest.fixture(scope="session")
def server(roomy_engine: Path) -> Iterator[ServerProcess]:
    with serving(roomy_engine, *FIXED_TREES, "--modelName", "tiny") as process:
        yield process


# As Qwen's, but that it does not show the tools: a letter is a token here.
CALLING = (
    '{%- if tools %}<tool_call>{"name": <name>, "arguments": <object>}</tool_call>{%- endif %}'
    "{%- for m in messages %} {{ m.role }}: {{ m.content }}{%- endfor %}"
)


@pytest.fixture(scope="session")
def lettered_server(
    roomy_engine: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """A server whose answers can be guided, of a model that knows tools."""

    def make(folder: Path) -> Path:
        return with_letters(roomy_engine, folder / "engine", chat_template=CALLING)

    engine = made_once(tmp_path_factory, "lettered", make)
    with serving(engine, *FIXED_TREES, "--modelName", "tiny") as process:
        yield process


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("there is no chromium on this machine")
    with playwright.sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox", *MICROPHONE])
        yield found
        found.close()


@pytest.fixture
def page(browser):
    """A fresh page; whatever it complains about, and whatever it loads from elsewhere, fails."""
    context = browser.new_context(viewport={"width": 1180, "height": 760})
    found = context.new_page()
    complaints, hosts = [], set()

    def said(message):
        if message.type in ("error", "warning"):
            complaints.append(message.text)

    found.on("console", said)
    found.on("pageerror", lambda error: complaints.append(str(error)))
    found.on("request", lambda sent: hosts.add(sent.url.split("/")[2].partition(":")[0]))
    found.expected = set()
    yield found
    found.unroute_all(behavior="ignoreErrors")
    context.close()
    assert not [line for line in complaints if not any(map(line.count, found.expected))]
    assert hosts <= {"127.0.0.1", ""}
