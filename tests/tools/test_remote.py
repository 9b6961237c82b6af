"""Questions and prompts sent to several servers: retries, resuming, lost servers."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from edgellm.core.errors import EdgeLLMError
from edgellm.tools.distributed.ray_map import require_ray
from edgellm.tools.distributed.servers import RejectedError, Servers
from edgellm.tools.evaluate.answers import OutputLog
from edgellm.tools.evaluate.datasets.questions import Question
from edgellm.tools.evaluate.remote import answer_remotely
from edgellm.tools.evaluate.scoring.scores import score
from edgellm.tools.evaluate.settings import Settings

GONE = "http://127.0.0.1:1"  # no server listens there


class Stub:
    """A server that echoes its requests; `faults` are the status codes of its first replies."""

    def __init__(self, model: str = "m", faults: tuple[int, ...] = ()) -> None:
        stub, self.received, self.faults, self.model = self, [], list(faults), model

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._reply(200, {"data": [{"id": stub.model}]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                stub.received.append(body)
                if stub.faults:
                    self._reply(stub.faults.pop(0), {"error": {"message": "no"}})
                elif "prompt" in body:
                    choice = {"text": "", "token_ids": [*body["prompt"][-1:], 7]}
                    self._reply(200, {"choices": [choice]})
                else:
                    self._reply(200, stub.chat(body))

            def log_message(self, *_: object) -> None:
                """Nothing."""

            def _reply(self, code: int, content: dict) -> None:
                data = json.dumps(content).encode()
                self.send_response(code)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    def chat(self, body: dict) -> dict:
        text = f"the answer to {body['messages'][-1]['content']}"
        drafted = {"num_spec_steps": 2, "num_accepted_draft_tokens": 3, "num_draft_tokens": 6}
        return {
            "choices": [{"message": {"content": text}, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 5, "completion_tokens": 6},
            "metrics": {"generation_time_ms": 20.0, "speculative_decoding": drafted},
        }

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()


@pytest.fixture
def stub():
    made = []

    def make(*args, **kwargs) -> Stub:
        made.append(Stub(*args, **kwargs))
        return made[-1]

    yield make
    for one in made:
        one.close()


def at_once(rows, work, num_servers):
    """Replacement of Ray: runs the work in this process."""
    del num_servers
    yield from (json.loads(json.dumps(work(json.loads(json.dumps(row))))) for row in rows)


def settings(questions: list[Question], **changes: object) -> Settings:
    facts = {
        "dataset": "d", "num_questions": len(questions), "data_sha256": "0", "model": "m",
        "engines": {}, "spec": None, "max_generate_length": 9, "temperature": 0.0, "seed": 1,
        "repeats": 1, **changes,
    }  # fmt: skip
    return Settings(**facts)


QUESTIONS = [
    Question(turns=["1", "2"], question_id=1),
    Question(turns=["3"], question_id="b", scoring="number", reference="3"),
    Question(turns=["4"], question_id=3, scoring="number", reference="5"),
]


def test_requests_of_a_lost_server_go_to_another(tmp_path, stub):
    one = stub()
    servers = Servers((GONE, one.url))
    assert servers.model() == "m"
    log = OutputLog(tmp_path / "plain.jsonl")
    answered: list[None] = []
    answer_remotely(
        servers, QUESTIONS, settings(QUESTIONS), log, lambda: answered.append(None), at_once
    )
    assert len(answered) == len(QUESTIONS) == len(log.records)
    first = log.records[1].choices[0]
    assert first.turns == ["the answer to 1", "the answer to 2"]
    assert one.received[1]["messages"][1]["content"] == "the answer to 1"
    assert (first.rounds, first.emitted_tokens) == ([2, 2], [5, 5])
    scores = score(QUESTIONS, {"plain": log.records}, None, None)
    assert [one.modes["plain"].scores.get("number exact") for one in scores.questions] == [
        None, 1.0, 0.0,
    ]  # fmt: skip
    log.close()


def test_an_interrupted_run_resumes_without_duplicates(tmp_path, stub):
    one = stub()
    path, run = tmp_path / "plain.jsonl", settings(QUESTIONS)

    def cut(rows, work, num_servers):
        yield next(at_once(rows, work, num_servers))
        raise KeyboardInterrupt

    log = OutputLog(path)
    with pytest.raises(KeyboardInterrupt):
        answer_remotely(Servers((one.url,)), QUESTIONS, run, log, lambda: None, cut)
    log.close()
    with path.open("ab") as stream:
        stream.write(b'{"question_id": 3, "ans')  # of a driver that was killed
    before, received = path.read_bytes().rpartition(b"\n")[0], len(one.received)

    def twice(rows, work, num_servers):
        for row in at_once(rows, work, num_servers):
            yield from (row, row)  # a task whose result was lost runs again

    log = OutputLog(path)
    answer_remotely(Servers((one.url,)), QUESTIONS, run, log, lambda: None, twice)
    assert path.read_bytes().startswith(before)
    assert sorted(map(str, log.records)) == ["1", "3", "b"]
    assert path.read_bytes().count(b"\n") == 3
    assert len(one.received) == received + 2
    answer_remotely(Servers((one.url,)), QUESTIONS, run, log, lambda: None, cut)  # nothing to do
    log.close()


def test_busy_servers_are_retried_and_rejections_recorded(tmp_path, stub):
    pauses: list[float] = []
    busy = stub(faults=(503, 429))
    servers = Servers((busy.url,), sleep=pauses.append)
    assert servers.post("/v1/completions", {"prompt": [4]}, 0)["choices"][0]["token_ids"] == [4, 7]
    assert pauses == [1.0, 2.0]
    rejecting = stub(faults=(400,))
    with pytest.raises(RejectedError, match="no"):
        Servers((rejecting.url,)).post("/v1/completions", {"prompt": [4]}, 0)
    log = OutputLog(tmp_path / "plain.jsonl")
    rejecting.faults = [400]
    answer_remotely(
        Servers((rejecting.url,)), QUESTIONS[:1], settings(QUESTIONS), log, lambda: None, at_once
    )
    assert log.records[1].choices[0].error == "no"
    log.close()


def test_servers_that_do_not_respond_or_differ_fail(stub):
    gone = Servers((GONE,), patience_s=0.5)
    with pytest.raises(EdgeLLMError, match=r"no server responds; the last error: http://127"):
        gone.post("/v1/completions", {}, 0)
    with pytest.raises(EdgeLLMError, match="none of these servers responds"):
        gone.model()
    with pytest.raises(EdgeLLMError, match="different models"):
        Servers((stub("m").url, stub("other").url)).model()


@pytest.mark.parametrize("text", ["", "localhost:8000", "http://a:1,http://a:1", "file:///x"])
def test_invalid_addresses_are_rejected(text):
    with pytest.raises(EdgeLLMError, match="--ray"):
        Servers.read(text)
    assert Servers.read("http://a:1/, http://b:2").urls == ("http://a:1", "http://b:2")


def test_training_prompts_resume_after_an_interrupt(tmp_path, stub):
    from edgellm.tools.train_draft.base import Prompt
    from edgellm.tools.train_draft.data.corpus import Generation, stored_answers
    from edgellm.tools.train_draft.data.remote import answer_prompts_remotely

    one, store = stub(), tmp_path / "answers.jsonl"
    prompts = [Prompt((1, 2)), Prompt((3, 4)), Prompt((5, 6))]
    how = Generation(max_new_tokens=16, sampled_share=0.5, temperature=0.8, batch=8, seed=0)
    servers = Servers((one.url,))
    stops = frozenset([7])
    begun = answer_prompts_remotely(servers, prompts[:1], stops, store, how, at_once)
    assert list(begun) == [0, 1]
    with store.open("a") as stream:
        stream.write('{"prompt": [3,')
    assert list(answer_prompts_remotely(servers, prompts, stops, store, how, at_once)) == [1, 2, 3]
    assert [(one.prompt.ids, one.answer) for one in stored_answers(store)] == [
        ((1, 2), (2, 7)), ((3, 4), (4, 7)), ((5, 6), (6, 7)),
    ]  # fmt: skip
    assert [body["temperature"] for body in one.received] == [0.0, 0.8, 0.0]
    assert all(body["stop_token_ids"] == [7] for body in one.received)


def test_ray_must_be_installed(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(EdgeLLMError, match="--ray needs Ray"):
        require_ray()
