"""The recipes of deploy/: their flags are ours, their forms those of who reads them."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import downloaded
import numpy as np
import pytest
from installed import PROJECT, ROOT

from edgellm.device_runtime import SamplingParams
from edgellm.tools.serve.protocols.kserve.tensors import DATATYPES, INPUTS, OUTPUTS

yaml = pytest.importorskip("yaml")
DEPLOY = ROOT / "deploy"
REPOSITORY = DEPLOY / "triton/edgellm/ensemble"
PROMPT = "w20 w30 w40"


def _flags(module: str) -> set[str]:
    command = [sys.executable, "-c", f"from {module} import main; main()", "--help"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return set(re.findall(r"--\w+", printed))


def test_flags_and_extras_exist():
    texts = {path.name: path.read_text("utf-8") for path in DEPLOY.rglob("*.yaml")}
    assert set(texts) == {"compose.yaml", "inference-service.yaml"}
    known = _flags("edgellm.tools.serve.cli") | _flags("edgellm.build.cli")
    for text in texts.values():
        lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
        assert set(re.findall(r"--[a-z]\w+", "\n".join(lines))) <= known
        for extras in re.findall(r'EXTRAS[=:] ?"?([\w,]+)', text):
            assert set(extras.split(",")) <= PROJECT["project"]["optional-dependencies"].keys()


def test_ports_and_volumes_fit():
    compose = yaml.safe_load((DEPLOY / "compose/compose.yaml").read_text("utf-8"))
    assert (DEPLOY / "compose" / compose["services"]["build"]["build"]["context"]).resolve() == ROOT
    assert (ROOT / compose["services"]["build"]["build"]["dockerfile"]).is_file()
    serve = compose["services"]["serve"]
    given = re.findall(r"--(?:p|grpcP|metricsP)ort (\d+)", serve["command"])
    assert [f"{port}:{port}" for port in given] == serve["ports"]
    assert {*serve["secrets"]} == {*compose["secrets"]}
    (service,) = yaml.safe_load_all((DEPLOY / "kserve/inference-service.yaml").read_text("utf-8"))
    assert service["kind"] == "InferenceService"
    predictor = service["spec"]["predictor"]
    (container,) = predictor["containers"]
    arguments = dict(word.partition("=")[::2] for word in container["args"])
    ports = {str(port["containerPort"]) for port in container["ports"]}
    assert ports == {arguments["--port"], arguments["--metricsPort"]}
    assert {one["name"] for one in container["volumeMounts"]} == {
        one["name"] for one in predictor["volumes"]
    }
    for probe in ("readinessProbe", "livenessProbe"):
        assert str(container[probe]["httpGet"]["port"]) == arguments["--port"]


def test_tritons_configurations(monkeypatch):
    """Parsed by the schema that tritonclient has."""
    folder = downloaded.packages(Path(__file__).with_name("tritonclient.txt"))
    monkeypatch.syspath_prepend(str(folder))
    from google.protobuf import text_format
    from tritonclient.grpc.model_config_pb2 import DataType, ModelConfig

    found = {}
    for path in (DEPLOY / "triton").rglob("config.pbtxt"):
        config = text_format.Parse(path.read_text("utf-8"), ModelConfig())
        found[config.backend] = config
        assert any((path.parent / "1").iterdir())
    assert set(found) == {"vllm", "python"}
    python = found["python"]
    assert python.model_transaction_policy.decoupled
    for tensors, known in ((python.input, INPUTS), (python.output, OUTPUTS)):
        assert {one.name: one.data_type for one in tensors} == {
            name: DATATYPES[datatype][0] for name, datatype in known.items()
        }
    assert [one.name for one in python.input if not one.optional] == ["text_input"]
    assert DataType.Value("TYPE_STRING") == DATATYPES["BYTES"][0]
    model = json.loads((DEPLOY / "triton/vllm/eagle_model/1/model.json").read_text("utf-8"))
    assert model["speculative_config"]["method"] == "eagle3"


class _Tensor:
    def __init__(self, name: str, values: np.ndarray) -> None:
        self.name, self.as_numpy = lambda: name, lambda: values


def _triton() -> ModuleType:
    """What Triton's process gives to a model, as far as it is used."""
    module = ModuleType("triton_python_backend_utils")
    module.TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
    module.Tensor = _Tensor
    module.TritonError = str

    def response(output_tensors, error=None):
        return SimpleNamespace(outputs=output_tensors, error=error)

    module.InferenceResponse = response
    return module


def _ask(model, **values: object) -> tuple[list[str], list[str], str | None]:
    """Texts, reasons and the error of the answer; the last response is marked."""
    sent, flags = [], []

    def send(response=None, flags_=0, **given):
        sent.extend([response] if response is not None else [])
        flags.append(given.get("flags", flags_))

    tensors = []
    for name, value in values.items():
        encoded = value.encode() if isinstance(value, str) else value
        kind = np.object_ if isinstance(value, str) else None
        tensors.append(_Tensor(name, np.array([encoded], dtype=kind)))
    request = SimpleNamespace(
        inputs=lambda: tensors,
        request_id=lambda: "1",
        is_cancelled=lambda: False,
        get_response_sender=lambda: SimpleNamespace(send=send),
    )
    model.execute([request])
    assert flags[-1] == 1
    assert set(flags[:-1]) <= {0}
    found = {name: [] for name in OUTPUTS}
    for response in sent:
        for tensor in response.outputs:
            found[tensor.name()].append(tensor.as_numpy()[0].decode())
    errors = [response.error for response in sent if response.error]
    return found["text_output"], found["finish_reason"], errors[0] if errors else None


def test_an_engine_in_the_python_backend(roomy_engine, offline, monkeypatch):
    answer = offline.generate(
        PROMPT, sampling=SamplingParams(temperature=0), max_generate_length=16
    )
    list(answer)
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", _triton())
    spec = importlib.util.spec_from_file_location("triton_model", REPOSITORY / "1/model.py")
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model = module.TritonPythonModel()
    given = {
        "engine_dir": {"string_value": str(roomy_engine)},
        "speculates": {"string_value": "true"},
    }
    model.initialize({"model_config": json.dumps({"parameters": given})})
    texts, reasons, error = _ask(model, text_input=PROMPT, max_tokens=16)
    assert (texts, reasons, error) == ([f"{PROMPT}{answer.text}"], ["length"], None)
    texts, _, _ = _ask(model, text_input=PROMPT, max_tokens=16, stream=True)
    assert len(texts) > 3
    assert "".join(texts) == answer.text
    for wrong, fragment in (({"max_tokens": 0}, "max_tokens"), ({"what": "x"}, "no input 'what'")):
        assert fragment in _ask(model, text_input=PROMPT, **wrong)[2]
    assert _ask(model, text_input=PROMPT, max_tokens=1)[2] is None  # it goes on
