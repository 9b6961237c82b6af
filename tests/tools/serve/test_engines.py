"""Several engines in one server: by name, on demand, within a budget of memory."""

from __future__ import annotations

import asyncio
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
from serve_process import serving

from edgellm.core.errors import (
    BrokenArtifactError,
    EdgeLLMError,
)
from edgellm.device_runtime import LLM, SamplingParams
from edgellm.device_runtime.scheduler.background_loop import BackgroundLoop
from edgellm.tools.serve.engines.models import Model, read_models
from edgellm.tools.serve.http.errors import ApiError
from edgellm.tools.serve.routing.engine_pool import LEASES, EnginePool
from edgellm.tools.serve.settings import Settings


class Loading:
    """Fake loader that records its calls."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.broken: set[str] = set()

    def load(self, model):
        self.log.append(f"+{model.name}")
        if model.name in self.broken:
            raise BrokenArtifactError(f"{model.name} is damaged")
        llm = SimpleNamespace(batch_size=1, embeds=False, adapters={}, on_pass=lambda _: None)
        llm.driver = lambda: BackgroundLoop(None)
        llm.load_adapter, llm.kv_cache_manager = (
            llm.adapters.__setitem__,
            SimpleNamespace(usage=0.0),
        )
        return llm

    def unload(self, model, _):
        self.log.append(f"-{model.name}")


@pytest.fixture
def made():
    """A pool of three engines with memory for two."""
    models = [Model(name=name, folder=Path(name), manifest=None, num_bytes=4) for name in "abc"]
    engines = EnginePool(
        models, Loading(), Settings(queue_size=3, total_timeout_s=60, memory_bytes=10)
    )
    engines.begin()
    yield engines
    engines.close()


class Request:
    """A request that leases an engine until it ends."""

    def __init__(self, **scope):
        self.leases = ExitStack()
        self.scope = {LEASES: self.leases, **scope}

    @classmethod
    async def of(cls, engines, name, keep_s=None):
        request = cls()
        request.served = await engines.of(name, request, keep_s)
        return request

    def end(self):
        self.leases.close()


async def _idle():
    """Run the loop until no task can continue."""
    for _ in range(20):
        await asyncio.sleep(0.005)


def test_engines_load_on_demand_and_the_least_recently_used_is_unloaded(made):
    async def use(name):
        request = await Request.of(made, name)
        request.end()
        return request.served.name

    async def run():
        return [await use(name) for name in (None, "a", "b", "a", "c", "b")]

    assert asyncio.run(run()) == ["a", "a", "b", "a", "c", "b"]
    # b was used longest ago when c came, a when b came again.
    assert made._loading.log == ["+a", "+b", "-b", "+c", "-a", "+b"]
    page = made.registry.page().decode()
    assert 'edgellm:engine_loaded{model_name="a"} 0.0' in page
    assert 'edgellm:engine_loaded{model_name="b"} 1.0' in page
    assert 'edgellm:engine_loads_total{model_name="b"} 2.0' in page


def test_an_engine_in_use_is_not_unloaded_and_no_request_starves(made):
    """Requests for an engine that is about to be unloaded join the same queue."""

    async def run():
        first, second = await Request.of(made, "a"), await Request.of(made, "b")
        waiting = asyncio.create_task(Request.of(made, "c"))
        await _idle()
        behind = asyncio.create_task(Request.of(made, "a"))  # a leaves, for it is the older
        other = await Request.of(made, "b")  # b does not
        await _idle()
        assert not waiting.done()
        assert not behind.done()
        first.end()
        third = await asyncio.wait_for(waiting, 5)
        await _idle()
        assert made._loading.log == ["+a", "+b", "-a", "+c"]
        second.end()
        await _idle()
        assert not behind.done()  # b has another user
        other.end()
        fourth = await asyncio.wait_for(behind, 5)
        assert made._loading.log[4:] == ["-b", "+a"]
        third.end()
        fourth.end()
        assert [place.num_users for place in made.places] == [0, 0, 0]

    asyncio.run(run())


def test_a_broken_engine_is_its_requests_fault_alone(made):
    made._loading.broken = {"b"}

    async def run():
        for _ in range(2):  # it may have been mended
            with pytest.raises(BrokenArtifactError, match="b is damaged"):
                await Request.of(made, "b")
        return (await Request.of(made, "c")).served.name

    assert asyncio.run(run()) == "c"
    with pytest.raises(ApiError, match="no model 'd' here, only 'a', 'b', 'c'") as caught:
        made.find("d")
    assert caught.value.status == 404


def test_requests_fail_when_loading_times_out_or_the_queue_is_full(made):
    async def run():
        await Request.of(made, "a")
        await Request.of(made, "b")
        late = Request(arrived=asyncio.get_running_loop().time() - 59.9)
        with pytest.raises(ApiError, match="c was not loaded in time") as caught:
            await made.of("c", late)
        assert caught.value.status == 504
        assert (await Request.of(made, "a")).served.name == "a"  # it need not leave any more
        tasks = [asyncio.create_task(Request.of(made, "c")) for _ in range(3)]
        await _idle()
        with pytest.raises(ApiError, match="3 requests are waiting") as caught:
            await Request.of(made, "c")
        assert caught.value.status == 429
        made.drain()
        with pytest.raises(ApiError, match="about to stop"):
            made.require_room()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(run())
    assert made._loading.log == ["+a", "+b"]


def test_adapters_come_back_with_their_engine(made):
    async def run():
        request = await Request.of(made, "b")
        request.served.llm.load_adapter("tuned", Path("tuned"))
        request.end()
        for name in ("a", "c"):  # b goes
            (await Request.of(made, name)).end()
        assert made.places[1].worker is None
        assert made.find("tuned") == (made.places[1], "tuned")
        request = await Request.of(made, "tuned")
        assert request.served.lora == request.served.name == "tuned"
        assert request.served.llm.adapters == {"tuned": Path("tuned")}
        request.end()

    asyncio.run(run())


def test_the_last_request_decides_how_long_its_engine_stays(made):
    log = made._loading.log

    async def run():
        first, second = await Request.of(made, "a", 0.0), await Request.of(made, "a")
        first.end()
        second.end()  # came later, and keeps it
        await _idle()
        assert log == ["+a"]
        first, second = await Request.of(made, "a"), await Request.of(made, "a", 0.0)
        second.end()
        await _idle()
        assert log == ["+a"]  # it has a request
        first.end()
        await _idle()
        assert log == ["+a", "-a"]
        (await Request.of(made, "a", 0.2)).end()
        (await Request.of(made, "a", 0.2)).end()
        await _idle()
        assert log == ["+a", "-a", "+a"]
        await asyncio.sleep(0.3)
        assert log == ["+a", "-a", "+a", "-a"]
        (await Request.of(made, "a", 0.05)).end()
        (await Request.of(made, "a")).end()
        await asyncio.sleep(0.2)
        assert log == ["+a", "-a", "+a", "-a", "+a"]

    asyncio.run(run())
    assert made.is_ready


def test_an_engine_is_unloaded_on_demand(made):
    log = made._loading.log

    async def run():
        await made.unload("b")  # is not loaded
        with pytest.raises(ApiError, match="no model 'd' here"):
            await made.unload("d")
        await made.unload("a")
        assert log == ["+a", "-a"]
        request = await Request.of(made, "a")
        await made.unload("a")  # returns, and waits for the request
        assert log == ["+a", "-a", "+a"]
        request.end()
        await _idle()
        assert log == ["+a", "-a", "+a", "-a"]
        request = await Request.of(made, "a")
        await made.unload("a")
        other = await Request.of(made, "a")  # came later, and keeps it
        request.end()
        other.end()
        await _idle()
        assert log[4:] == ["+a"]

    asyncio.run(run())


def test_an_engine_that_expires_while_the_server_stops_is_closed_once(made):
    async def run():
        (await Request.of(made, "a", 0.0)).end()
        made.drain()
        await _idle()

    asyncio.run(run())
    assert made._loading.log == ["+a"]
    made.close()
    assert made._loading.log == ["+a", "-a"]


# ------------------------------------------------------------------------- what is given
def test_names_of_engines(roomy_engine, tiny_engine):
    given = [str(roomy_engine), f"small={tiny_engine}"]
    first, second = read_models(given)
    assert (first.name, second.name, second.folder) == ("engine", "small", tiny_engine)
    assert read_models(given[:1], first_name="tiny")[0].name == "tiny"
    files = sum(path.stat().st_size for path in tiny_engine.iterdir())
    assert second.num_bytes > 0.9 * files
    assert first.num_bytes > second.num_bytes  # it has more rows, and a draft


@pytest.mark.parametrize(
    ("given", "options", "reason"),
    [
        (["{a}", "{a}"], {}, "two engines are named engine"),
        (["b={a}", "b={a}"], {}, "two engines are named b"),
        (["={a}"], {}, "a name or a folder is missing"),
        (["{a}", "b=missing"], {}, "no such folder: missing"),
        (["{a}", "b={a}"], {"first_name": "c"}, "--modelName names the only engine"),
        (["b={a}"], {"visual": ["c={a}"]}, "there is no engine c"),
        (["b={a}"], {"visual": ["{a}", "b={a}"]}, "b has a visual engine already"),
        (["b={a}"], {"budget_bytes": 1e4}, "b needs 0.0. GB, --memoryBudget is 0.00"),
    ],
)
def test_engines_that_cannot_be_given(roomy_engine, given, options, reason):
    def filled(texts):
        return [text.format(a=roomy_engine) for text in texts]

    if "visual" in options:
        options = {**options, "visual": filled(options["visual"])}
    with pytest.raises(EdgeLLMError, match=reason):
        read_models(filled(given), **options)


# ------------------------------------------------------------------------------- a server
def _text(engine, prompt, tokens):
    with LLM(engine) as llm:
        sampling = SamplingParams(temperature=0, ignore_eos=True)
        answer = llm.generate(prompt, sampling=sampling, max_generate_length=tokens)
        return "".join(step.text for step in answer)


def test_a_server_of_two_engines_with_room_for_one(roomy_engine, tiny_engine, tmp_path):
    """Concurrent requests to both: each engine is unloaded when its requests have ended."""
    broken = tmp_path / "broken"
    shutil.copytree(tiny_engine, broken)
    with (broken / "decode.onnx").open("ab") as stream:
        stream.write(b"more")
    models = read_models([f"big={roomy_engine}", f"small={tiny_engine}"])
    budget = max(model.num_bytes for model in models) * 1.01 / 1e9
    body = {"prompt": "w20 w30", "temperature": 0, "ignore_eos": True}
    given = (f"small={tiny_engine}", f"broken={broken}", f"big={roomy_engine}")
    flags = [flag for folder in given[1:] for flag in ("--engineDir", folder)]
    with serving(given[0], *flags, "--memoryBudget", budget) as server:
        assert server.greeting.startswith("small, broken, big answer at http")
        asks = [("big", 300), ("small", 40), ("big", 9), ("small", 9)]
        bodies = [{**body, "model": name, "max_tokens": tokens} for name, tokens in asks]
        with ThreadPoolExecutor(4) as pool:
            found = [*pool.map(lambda one: server.json("/v1/completions", one), bodies)]
        for (name, tokens), (status, answer) in zip(asks, found, strict=True):
            engine = {"big": roomy_engine, "small": tiny_engine}[name]
            assert (status, answer["model"]) == (200, name)
            assert answer["choices"][0]["text"] == _text(engine, body["prompt"], tokens)
        cards = server.json("/v1/models")[1]["data"]
        assert [card["id"] for card in cards] == ["small", "broken", "big"]
        (loaded,) = [card["id"] for card in cards if card["loaded"]]
        assert server.json("/api/ps")[1]["models"][0]["name"] == f"{loaded}:latest"
        status, answer = server.json("/v1/completions", {**body, "model": "broken"})
        assert status == 500
        assert "decode.onnx" in answer["error"]["message"]
        assert server.json("/v2/models/big")[1]["name"] == "big"
        assert server.json("/v1/completions", {**body, "model": "small"})[0] == 200
        assert server.metric("edgellm:engine_loads_total") >= 3
        assert server.json("/health") == (200, {"status": "ok"})
