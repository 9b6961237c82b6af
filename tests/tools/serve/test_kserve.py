"""KServe's protocol, version 2, as NVIDIA's tritonclient and plain JSON speak it."""

from __future__ import annotations

import json
import queue
import re
import struct
from pathlib import Path

import downloaded
import numpy as np
import pytest
from serve_process import ServerProcess, serving

from edgellm.device_runtime import SamplingParams
from edgellm.device_runtime.api.generation_request import GenerationDefaults
from edgellm.tools.serve.http.errors import ApiError
from edgellm.tools.serve.protocols.kserve import infer
from edgellm.tools.serve.protocols.kserve.tensors import INPUTS, Tensor, read_bytes, request_of

PROMPT, TOKENS = "w20 w30 w40", 16
PATH = "/v2/models/tiny/infer"


@pytest.fixture(scope="module")
def expected(offline) -> str:
    answer = offline.generate(
        PROMPT, sampling=SamplingParams(temperature=0), max_generate_length=TOKENS
    )
    list(answer)
    return answer.text


def _json(name: str, datatype: str, *values: object) -> dict:
    return {"name": name, "datatype": datatype, "shape": [1, len(values)], "data": [[*values]]}


TEXT, MOST = _json("text_input", "BYTES", PROMPT), _json("max_tokens", "INT32", TOKENS)
WITHOUT = _json("exclude_input_in_output", "BOOL", True)


def test_infer_with_json_tensors_returns_the_requested_outputs(server, expected):
    status, found = server.json(PATH, {"id": "7", "inputs": [TEXT, MOST, WITHOUT]})
    assert (status, found["id"], found["model_version"]) == (200, "7", "1")
    (output,) = found["outputs"]
    assert output == {"name": "text_output", "datatype": "BYTES", "shape": [1], "data": [expected]}
    outputs = [{"name": "finish_reason"}, {"name": "text_output"}]
    found = server.json(
        "/v2/models/tiny/versions/1/infer", {"inputs": [TEXT, MOST], "outputs": outputs}
    )[1]
    reason, text = found["outputs"]
    assert (reason["data"], text["data"]) == (["length"], [f"{PROMPT}{expected}"])


def test_ensemble_parameters_in_generate(server, expected):
    """As the tutorials on TensorRT-LLM's backend write them."""
    body = {"text_input": PROMPT, "max_tokens": TOKENS, "bad_words": "", "stop_words": ""}
    status, found = server.json("/v2/models/tiny/generate", body)
    assert (status, found["text_output"]) == (200, f"{PROMPT}{expected}")
    word = expected.split()[4]
    for words in (word, [word]):
        found = server.json("/v2/models/tiny/generate", {**body, "stop_words": words})[1]
        assert found["text_output"] == f"{PROMPT}{expected.partition(word)[0]}"
        found = server.json("/v2/models/tiny/generate", {**body, "bad_words": words})[1]
        assert word not in found["text_output"].removeprefix(PROMPT).split()
    for wrong, fragment in (
        ({"beam_width": 2}, "beam_width"),
        ({"parameters": {"temperature": 0}}, "not both"),
        ({"sampling_param_seed": 1}, "not both"),
    ):
        status, found = server.json("/v2/models/tiny/generate", {**body, **wrong})
        assert (status, fragment in found["error"]) == (400, True)


@pytest.mark.parametrize(
    ("place", "name"), [("", "temperature"), ("inputs", "classification"), ("outputs", "top_k")]
)
def test_unknown_parameters_are_rejected(server, place, name):
    body = {"inputs": [{**TEXT}, MOST], "outputs": [{"name": "text_output"}], "parameters": {}}
    (body[place][0] if place else body)["parameters"] = {name: 1}
    status, found = server.json(PATH, body)
    assert (status, f"parameters.{name}" in found["error"]) == (400, True)


def test_metadata_over_http(server):
    assert server.json("/v2")[1]["name"] == "edgellm"
    found = server.json("/v2/models/tiny")[1]
    assert {one["name"]: one["datatype"] for one in found["inputs"]} == INPUTS
    config = server.json("/v2/models/tiny/versions/1/config")[1]
    assert config["input"][0] == {"name": "text_input", "data_type": "TYPE_STRING", "dims": [1]}
    assert config["model_transaction_policy"] == {"decoupled": True}
    for path in ("/v2/models/other", "/v2/models/tiny/versions/2", "/v2/models/other/config"):
        assert server.json(path)[0] == 404
    assert server.send("/v2/models/tiny/versions/1/ready")[0] == 200


@pytest.mark.parametrize(
    ("body", "fragment"),
    [
        ({"inputs": []}, "text_input"),
        ({"inputs": [TEXT, TEXT]}, "twice"),
        ({"inputs": [_json("text", "BYTES", "x")]}, "no input 'text'; there are text_input"),
        ({"inputs": [_json("text_input", "BYTES", "x", "y")]}, "one value, not 2"),
        ({"inputs": [{**TEXT, "shape": [2]}]}, "1 values, but the shape [2]"),
        ({"inputs": [{**TEXT, "data": None}]}, "no data"),
        ({"inputs": [_json("text_input", "INT32", "x")]}, "'x' is no INT32"),
        ({"inputs": [_json("text_input", "WORDS", "x")]}, "no datatype 'WORDS'"),
        ({"inputs": [TEXT, _json("max_tokens", "INT32", 0)]}, "max_tokens"),
        ({"inputs": [TEXT, _json("stream", "BOOL", True)]}, "generate_stream"),
        ({"inputs": [TEXT, _json("sampling_parameters", "BYTES", "[]")]}, "not an object"),
        ({"inputs": [TEXT, _json("sampling_parameters", "BYTES", "{")]}, "not JSON"),
        ({"inputs": [TEXT], "outputs": [{"name": "logits"}]}, "no output 'logits'"),
        ({"inputs": [{**TEXT, "parameters": {"binary_data_size": 9}}]}, "binary_data_size"),
    ],
)
def test_invalid_infer_bodies_get_400_with_the_reason(server, body, fragment):
    status, found = server.json(PATH, body)
    assert (status, list(found)) == (400, ["error"])
    assert fragment in found["error"]


def test_bytes_after_the_json():
    text = struct.pack("<I", 3) + b"w20"
    head = {
        "inputs": [
            {"name": "text_input", "datatype": "BYTES", "shape": [1],
             "parameters": {"binary_data_size": len(text)}},
            {"name": "top_k", "datatype": "INT32", "shape": [1, 1],
             "parameters": {"binary_data_size": 4}},
        ],
        "outputs": [{"name": "text_output", "parameters": {"binary_data": True}}],
    }  # fmt: skip
    raw = json.dumps(head).encode()
    found = infer.parse(raw + text + struct.pack("<i", 5), str(len(raw)))
    assert (found.body.text_input, found.body.top_k) == ("w20", 5)
    content, headers = infer.answer(found, {"model_name": "tiny", "text_output": "äh"})
    length = int(headers[infer.HEADER_LENGTH])
    assert content[length:] == struct.pack("<I", 3) + "äh".encode()
    for behind, header, fragment in (
        (text + b"1234", len(raw) + 99, "of a body of"),
        (text + b"1234" + b"x", len(raw), "1 bytes are of no tensor"),
        (text, len(raw), "binary_data_size 4"),
    ):
        with pytest.raises(ApiError, match=re.escape(fragment)):
            infer.parse(raw + behind, str(header))
    for name, datatype, wrong in (("a", "BYTES", text[:5]), ("a", "INT32", b"123")):
        with pytest.raises(ApiError):
            read_bytes(name, datatype, [1], wrong)


def test_sampling_parameters_of_genai_perf_are_read():
    """Numbers of vLLM's parameters come as texts."""
    given = [
        Tensor(name="text_input", datatype="BYTES", shape=(1,), values=("w20",)),
        Tensor(name="exclude_input_in_output", datatype="BOOL", shape=(1,), values=(True,)),
        Tensor(name="stream", datatype="BOOL", shape=(1,), values=(True,)),
        Tensor(
            name="sampling_parameters",
            datatype="BYTES",
            shape=(1,),
            values=('{"max_tokens": "9", "min_tokens": "9"}',),
        ),
    ]
    ask = request_of(given, "").ask(GenerationDefaults())
    assert (ask.max_tokens, ask.sampling.min_tokens) == (9, 9)


@pytest.fixture(scope="module")
def triton(roomy_engine, tmp_path_factory):
    """A server with all of Triton's ports, and the ports of gRPC and of metrics."""
    folder = downloaded.packages(Path(__file__).with_name("tritonclient.txt"))
    key = tmp_path_factory.mktemp("keys") / "keys"
    key.write_text("secret-of-the-test\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        patch.setenv("PYTHONPATH", str(folder), prepend=":")
        flags = ("--modelName", "tiny", "--grpcPort", 0, "--metricsPort", 0, "--apiKeyFile", key)
        with serving(roomy_engine, "--eagle", *flags) as process:
            ports = re.search(r"gRPC at 127.0.0.1:(\d+), metrics at port (\d+)", process.greeting)
            assert ports, process.greeting
            yield process, int(ports[1]), int(ports[2])


HEADERS = {"authorization": "Bearer secret-of-the-test"}


def _inputs(module, **values):
    numpys = {"BYTES": np.object_, "INT32": np.int32, "BOOL": np.bool_, "FP32": np.float32}
    made = []
    for name, value in values.items():
        tensor = module.InferInput(name, [1, 1], INPUTS[name])
        tensor.set_data_from_numpy(np.array([[value]], dtype=numpys[INPUTS[name]]))
        made.append(tensor)
    return made


def test_tritonclient_over_http(triton, expected):
    import tritonclient.http as module  # it writes into the headers that it is given

    client = module.InferenceServerClient(f"127.0.0.1:{triton[0].port}")
    assert client.is_server_ready()
    assert client.is_model_ready("tiny", headers={**HEADERS})
    assert client.get_server_metadata(headers={**HEADERS})["name"] == "edgellm"
    assert client.get_model_metadata("tiny", "1", headers={**HEADERS})["versions"] == ["1"]
    assert client.get_model_config("tiny", headers={**HEADERS})["max_batch_size"] == 0
    inputs = _inputs(
        module, text_input=PROMPT, max_tokens=TOKENS, temperature=0.0, exclude_input_in_output=True
    )
    for outputs in (None, [module.InferRequestedOutput("text_output", binary_data=False)]):
        found = client.infer("tiny", inputs, outputs=outputs, request_id="9", headers={**HEADERS})
        assert found.as_numpy("text_output")[0] in (expected, expected.encode())
        assert found.get_response()["id"] == "9"
    known = {"sequence_id": 5, "sequence_start": True, "priority": 1, "timeout": 10**6}
    found = client.infer("tiny", inputs, headers={**HEADERS}, **known)
    assert found.as_numpy("text_output")[0] == expected.encode()
    with pytest.raises(Exception, match=r"parameters\.temperatur"):
        client.infer("tiny", inputs, headers={**HEADERS}, parameters={"temperatur": 1})
    with pytest.raises(Exception, match="an API key is needed"):
        client.infer("tiny", inputs)
    client.close()


def test_tritonclient_over_grpc(triton, expected):
    import tritonclient.grpc as module
    from tritonclient.utils import InferenceServerException

    with module.InferenceServerClient(f"127.0.0.1:{triton[1]}") as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("tiny", headers=HEADERS)
        assert client.get_server_metadata(headers=HEADERS).name == "edgellm"
        found = client.get_model_metadata("tiny", headers=HEADERS)
        assert [one.name for one in found.inputs] == list(INPUTS)
        config = client.get_model_config("tiny", headers=HEADERS).config
        assert config.model_transaction_policy.decoupled
        assert (config.input[1].name, config.input[1].optional) == ("max_tokens", True)
        assert config.input[1].data_type == 8  # TYPE_INT32
        given = {"text_input": PROMPT, "max_tokens": TOKENS, "exclude_input_in_output": True}
        found = client.infer("tiny", _inputs(module, **given), request_id="9", headers=HEADERS)
        assert found.as_numpy("text_output")[0].decode() == expected
        assert found.get_response().id == "9"
        for name, values, code in (
            ("other", given, "NOT_FOUND"),
            ("tiny", {**given, "max_tokens": -1}, "INVALID_ARGUMENT"),
            ("tiny", {**given, "stream": True}, "INVALID_ARGUMENT"),
        ):
            with pytest.raises(InferenceServerException) as failed:
                client.infer(name, _inputs(module, **values), headers=HEADERS)
            assert code in failed.value.status()
        known = {"sequence_id": 5, "sequence_start": True, "priority": 1, "timeout": 10**6}
        found = client.infer("tiny", _inputs(module, **given), headers=HEADERS, **known)
        assert found.as_numpy("text_output")[0].decode() == expected
        outputs = [module.InferRequestedOutput("text_output", class_count=2)]
        with pytest.raises(InferenceServerException, match=r"parameters\.classification: unknown"):
            client.infer("tiny", _inputs(module, **given), outputs=outputs, headers=HEADERS)
        with pytest.raises(InferenceServerException, match=r"parameters\.temperatur: unknown"):
            client.infer(
                "tiny", _inputs(module, **given), headers=HEADERS, parameters={"temperatur": 1}
            )
        with pytest.raises(InferenceServerException, match=r"did you mean priority\?"):
            client.infer(
                "tiny", _inputs(module, **given), headers=HEADERS, parameters={"prioritty": 1}
            )
        with pytest.raises(InferenceServerException, match="an API key is needed"):
            client.infer("tiny", _inputs(module, **given))


def _streamed(client, module, requests: list[dict], *, final: bool) -> list:
    """What comes back for requests in one stream, until as many are answered."""
    found: queue.Queue = queue.Queue()
    client.start_stream(lambda result, error: found.put((result, error)), headers=HEADERS)
    for at, values in enumerate(requests):
        client.async_stream_infer(
            "tiny", _inputs(module, **values), request_id=str(at), enable_empty_final_response=final
        )
    client.stop_stream()  # which waits for the answers
    return [found.get_nowait() for _ in range(found.qsize())]


def test_streams_over_grpc(triton, expected):
    import tritonclient.grpc as module

    given = {"text_input": PROMPT, "max_tokens": TOKENS}
    requests = [{**given, "stream": True}, {**given, "top_k": -1}, {**given, "stream": False}]
    with module.InferenceServerClient(f"127.0.0.1:{triton[1]}") as client:
        for final in (False, True):
            came = _streamed(client, module, requests, final=final)
            faults = [str(error) for _, error in came if error is not None]
            assert len(faults) == 1
            assert "top_k" in faults[0]
            by_id: dict[str, list] = {"0": [], "2": []}
            for result, _ in came:
                if result is not None:
                    by_id[result.get_response().id].append(result)
            texts = {
                name: [one.as_numpy("text_output") for one in results]
                for name, results in by_id.items()
            }
            pieces = [text[0].decode() for text in texts["0"] if text is not None]
            assert len(pieces) > 3
            assert "".join(pieces) == expected
            assert [text[0].decode() for text in texts["2"]] == [f"{PROMPT}{expected}"]
            flags = [
                one.get_response().parameters["triton_final_response"].bool_param
                for one in by_id["0"]
            ]
            assert flags == [False] * len(pieces) + [True] * final


def test_a_client_that_leaves_frees_the_engine(triton):
    import tritonclient.grpc as module

    process = triton[0]
    given = {"text_input": PROMPT, "max_tokens": 3000, "stream": True}
    found: queue.Queue = queue.Queue()
    with module.InferenceServerClient(f"127.0.0.1:{triton[1]}") as client:
        client.start_stream(lambda result, error: found.put(result or error), headers=HEADERS)
        client.async_stream_infer("tiny", _inputs(module, **given))
        assert found.get(timeout=60) is not None
        client.stop_stream(cancel_requests=True)
    waited = ServerProcess.wait_until
    process.send, plain = lambda path: type(process).send(process, path, **HEADERS), process.send
    try:
        waited(process, "vllm:num_requests_running", 0)
    finally:
        process.send = plain


def test_grpc_calls_are_in_the_log(triton, roomy_engine):
    """One line for each call, and for each request of a stream."""
    del triton  # has installed the client
    import tritonclient.grpc as module
    from tritonclient.utils import InferenceServerException

    flags = ("--modelName", "tiny", "--grpcPort", 0, "--logLevel", "info", "--logFormat", "json")
    server = ServerProcess(roomy_engine, *flags)
    port = re.search(r"gRPC at 127.0.0.1:(\d+)", server.greeting)[1]
    given = {"text_input": PROMPT, "max_tokens": TOKENS, "temperature": 0.0}
    found: queue.Queue = queue.Queue()
    with module.InferenceServerClient(f"127.0.0.1:{port}") as client:
        assert client.is_server_live()  # a probe
        client.infer("tiny", _inputs(module, **given))
        with pytest.raises(InferenceServerException):
            client.infer("other", _inputs(module, **given))
        client.get_model_metadata("tiny")
        _streamed(client, module, [{**given, "stream": True}, {**given, "top_k": -1}], final=True)
        client.start_stream(lambda result, error: found.put(result or error))
        left = _inputs(module, text_input=PROMPT, max_tokens=3000, stream=True)
        client.async_stream_infer("tiny", left)
        assert found.get(timeout=60) is not None
        client.stop_stream(cancel_requests=True)
    server.wait_until("vllm:num_requests_running", 0)
    code, errors = server.end()
    assert code == 0
    lines = [json.loads(line) for line in errors.splitlines()]
    calls = [line for line in lines if line.get("method") == "gRPC"]
    service = "/inference.GRPCInferenceService/"
    assert [(call["path"].removeprefix(service), call["status"]) for call in calls] == [
        ("ModelInfer", "OK"), ("ModelInfer", "NOT_FOUND"), ("ModelMetadata", "OK"),
        ("ModelStreamInfer", "OK"), ("ModelStreamInfer", "INVALID_ARGUMENT"),
        ("ModelStreamInfer", "CANCELLED"),
    ]  # fmt: skip
    counts = [(call["prompt_tokens"], call["output_tokens"]) for call in calls]
    assert counts[:5] == [(3, TOKENS), (0, 0), (0, 0), (3, TOKENS), (0, 0)]
    assert counts[5][0] == 3
    assert 0 < counts[5][1] < 3000
    assert calls[5]["ending"] == "the client disconnected"
    assert calls[0]["message"].startswith(f"gRPC {service}ModelInfer OK, 3 + {TOKENS} tokens, ")


def test_metrics_at_a_separate_port(triton):
    process, _, port = triton
    from http.client import HTTPConnection

    connection = HTTPConnection("127.0.0.1", port)
    connection.request("GET", "/metrics", headers=HEADERS)
    assert b"vllm:generation_tokens_total" in connection.getresponse().read()
    connection.request("GET", "/v1/models", headers=HEADERS)
    assert connection.getresponse().status == 404
    connection.close()
    assert "answers at http" in process.greeting
