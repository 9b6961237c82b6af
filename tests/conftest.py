"""Fixtures: tiny random checkpoints with a tokenizer, engines made of them, the real SmolLM2."""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import json
import os
import resource
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is first imported

import forks
import without_host
from hypothesis import settings
from made_once import made_once
from nightly_cases import mark_nightly

from edgellm.core.cli import _explain as explain
from edgellm.core.commands.entry_points import MODULES
from edgellm.core.errors import EdgeLLMError
from edgellm.export import models
from edgellm.scripts import smollm2

if TYPE_CHECKING:
    from eagle_engines import EaglePair

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("quick", settings.get_profile("repeatable"), max_examples=25)
settings.load_profile("repeatable")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="Leave out what needs torch and its kin.")
    parser.addoption("--folders", action="store_true", help="Say what each folder of tests took.")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not terminalreporter.config.getoption("folders"):
        return
    took: dict[str, float] = {}
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                folder = str(Path(report.nodeid.partition("::")[0]).parent)
                took[folder] = took.get(folder, 0.0) + report.duration
    terminalreporter.section("seconds by folder, of all workers")
    for folder, seconds in sorted(took.items(), key=lambda item: -item[1]):
        terminalreporter.write_line(f"{seconds:7.1f}  {folder}")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Print a failure at once, so that a run that is cut off shows its failures."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        sys.stdout.write(f"\nFAILED {report.nodeid}\n{report.longreprtext}\n")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Refuse cases without an order: workers that collect different orders run no test."""
    for mark in metafunc.definition.iter_markers("parametrize"):
        cases = mark.args[1] if len(mark.args) > 1 else mark.kwargs["argvalues"]
        if isinstance(cases, (set, frozenset)):
            raise pytest.UsageError(f"{metafunc.definition.nodeid}: sort the cases, a set")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("quick"):
        config.pluginmanager.register(without_host)
        settings.load_profile("quick")


# Workers get whole files, the longest first: at the end they finish at the same time.
LONGEST = (
    "test_real.py",
    "test_docs.py",
    "test_models.py",
    "test_page.py",
    "test_benchmarks.py",
    "test_train_draft.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_nightly(items)
    items.sort(key=lambda item: item.path.name not in LONGEST)


def pytest_collection_finish() -> None:
    """Spare each later garbage collection half a second, for the objects of imported modules."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def one_thread_of_onnxruntime() -> Iterator[None]:
    """Run portable graphs on one thread: of tiny ones, a second thread only spins.

    Engines keep the threads of their plan, and commands in a process of their own the default.
    """
    import onnxruntime

    class OneThread(onnxruntime.SessionOptions):
        def __init__(self) -> None:
            super().__init__()
            self.intra_op_num_threads = 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(onnxruntime, "SessionOptions", OneThread)
        yield


@pytest.fixture(autouse=True)
def noted_environment() -> None:
    """Of commands that a test starts."""
    forks.begin_test()


@pytest.fixture(autouse=True)
def own_signal_handlers() -> Iterator[None]:
    """After the first Ctrl-C commands let the second end the process: here that is the worker."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = {number: signal.getsignal(number) for number in numbers}
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs ignore it
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'tool' %}"
    "{{ raise_exception('no tools here') }}{% endif %}"
    "{{ message['role'] }} : {{ message['content'] }} . {% endfor %}"
    "{% if add_generation_prompt %}assistant : {% endif %}"
)
# The scales are those of a mixture of experts next to an MLP, and of AltUp.
NORMS = (
    "norm.weight",
    "norm_1.weight",
    "norm_2.weight",
    "router.scale",
    "per_expert_scale",
    "correct_output_scale",
)
WORDS = ["<unk>", "<s>", "</s>", ":", ".", "system", "user", "assistant", "tool"]


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write a word-level tokenizer: w9, w10, ... and `WORDS`."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = WORDS + [f"w{index}" for index in range(len(WORDS), vocab_size)]
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def make_checkpoint(
    folder: Path, *, dtype: str = "float32", seed: int = 0, **config: object
) -> Path:
    """A randomly initialized transformers model of the given config, saved to `folder`."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from edgellm.export.pipeline.causal_lm import register_causal_lms

    register_causal_lms()
    torch.manual_seed(seed)
    hf_config = AutoConfig.for_model(**config, initializer_range=0.2, eos_token_id=2)
    model = AutoModelForCausalLM.from_config(hf_config)
    with torch.no_grad():
        for name, parameter in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith(NORMS):
                parameter.uniform_(0.5, 1.5)
            elif name.endswith(("bias", "sinks")):
                parameter.normal_(0, 0.2)
    folder.mkdir(parents=True, exist_ok=True)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    write_tokenizer(folder, hf_config.vocab_size)
    return folder


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = models.find("llama").TINY
    return made_once(tmp_path_factory, "tiny", lambda to: make_checkpoint(to, **sizes))


@pytest.fixture(scope="session")
def tiny_bundle(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from edgellm.export.graph.architecture import ExportOptions
    from edgellm.export.pipeline.llm import export_llm
    from edgellm.export.pipeline.open_checkpoint import open_checkpoint

    def make(folder: Path) -> Path:
        options = ExportOptions(dtype="fp32")
        export_llm(open_checkpoint(str(tiny_checkpoint)), folder / "tiny", options)
        return folder / "tiny"

    return made_once(tmp_path_factory, "bundle", make)


@pytest.fixture(scope="session")
def speech_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A multilingual Whisper of one-second windows."""
    from speech_checkpoints import make_speech

    return made_once(tmp_path_factory, "speech", make_speech)


@pytest.fixture(scope="session")
def speech_engine(speech_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its engine in float32, next to its bundle."""
    from speech_checkpoints import build_speech

    def make(folder: Path) -> Path:
        return build_speech(folder, speech_checkpoint)

    return made_once(tmp_path_factory, "speech_engine", make)


@pytest.fixture(scope="session")
def deaf_engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The engine of a speech model that writes the same text whatever it hears."""
    from speech_checkpoints import build_speech, make_deaf

    def make(folder: Path) -> Path:
        return build_speech(folder, make_deaf(folder / "model"))

    return made_once(tmp_path_factory, "deaf_engine", make)


@pytest.fixture(scope="session")
def tiny_int4_bundle(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model quantized to INT4 in groups of 16, from a quantized checkpoint."""
    from harness.models.checkpoints import round_checkpoint

    from edgellm.export.graph.architecture import ExportOptions
    from edgellm.export.pipeline.llm import export_llm
    from edgellm.export.pipeline.open_checkpoint import open_checkpoint

    def make(folder: Path) -> Path:
        round_checkpoint(str(tiny_checkpoint), folder / "checkpoint", 16)
        checkpoint = open_checkpoint(str(folder / "checkpoint"))
        export_llm(checkpoint, folder / "bundle", ExportOptions(dtype="fp32"))
        return folder / "bundle"

    return made_once(tmp_path_factory, "int4_bundle", make)


def _tiny_engine(factory: pytest.TempPathFactory, name: str, bundle: Path, **more: Any) -> Path:
    from edgellm.build.engine import build_engine
    from edgellm.build.plan import Plan

    def make(folder: Path) -> Path:
        plan = Plan(max_input_len=48, kv_capacity=64, threads=1, **more)
        build_engine("llm", bundle, folder / name, plan, "onnxruntime", lambda _: None)
        return folder / name

    return made_once(factory, f"{name}_engine", make)


@pytest.fixture(scope="session")
def tiny_int4_engine(tiny_int4_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _tiny_engine(tmp_path_factory, "int4", tiny_int4_bundle, prefill="int8")


@pytest.fixture(scope="session")
def tiny_engine(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _tiny_engine(tmp_path_factory, "tiny", tiny_bundle, prefill="auto")


@pytest.fixture(scope="session")
def tree_engine(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny engine, built to verify trees of 12 nodes; it has no hidden states for a draft."""
    sizes = {"prefill": "auto", "max_verify_tree_size": 12}
    return _tiny_engine(tmp_path_factory, "trees", tiny_bundle, **sizes)


@pytest.fixture(scope="session")
def eagle_pairs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], EaglePair]:
    """Tiny bases with drafts by name, each built on first use."""
    import eagle_engines
    import mtp_reference

    made: dict[str, EaglePair] = {}
    build = eagle_engines.build_pair
    makers: dict[str, Callable[[Path], EaglePair]] = {
        "eagle3": build,
        "int8_draft": lambda folder: eagle_engines.with_int8_draft(get("eagle3"), folder / "e"),
        "int4": lambda folder: build(folder, int4=True),
        "eagle1": lambda folder: build(folder, eagle_engines.EAGLE1),
        "window": lambda folder: eagle_engines.with_eagle(
            get("eagle3"), folder, eagle_engines.WINDOW
        ),
        "low_rank": lambda folder: eagle_engines.with_eagle(
            get("eagle3"), folder, eagle_engines.LOW_RANK
        ),
        "medusa": eagle_engines.build_medusa,
        "mtp": eagle_engines.build_mtp,
        "ernie": lambda folder: eagle_engines.build_mtp(folder, mtp_reference.make_ernie),
        "peagle": lambda folder: build(folder, eagle_engines.PEAGLE),
        "peagle_window": lambda folder: eagle_engines.with_eagle(
            get("peagle"), folder, eagle_engines.PEAGLE_WINDOW
        ),
        "hybrid": lambda folder: build(folder, model_type="qwen3_5_text"),
        "assistant": eagle_engines.build_assistant,
        "unified_assistant": lambda folder: eagle_engines.build_assistant(folder, "gemma4_unified"),
    }

    def get(name: str) -> EaglePair:
        if name not in made:
            made[name] = made_once(tmp_path_factory, name, makers[name])
        return made[name]

    return get


@pytest.fixture(scope="session")
def eagle_pair(eagle_pairs: Callable[[str], EaglePair]) -> EaglePair:
    return eagle_pairs("eagle3")


@pytest.fixture(scope="session")
def shared_engine(eagle_pair: EaglePair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with its draft, for batches of three."""
    import eagle_engines

    def make(folder: Path) -> Path:
        return eagle_engines.for_several(eagle_pair, folder / "engine", 3)

    return made_once(tmp_path_factory, "shared", make)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For tiny matrices in torch; more threads only wait for each other."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The real model; `make test` fetches it."""
    path = smollm2.cached()
    if path is None:
        pytest.skip("SmolLM2 is not there: python -m edgellm.scripts.smollm2 fetches it")
    return path


@pytest.fixture(scope="session")
def smollm2_bundles(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real model and its EAGLE-3 draft, exported."""
    from real_cases import make_bundles

    return made_once(tmp_path_factory, "smollm2", lambda to: make_bundles(smollm2_gguf, to))


@pytest.fixture(scope="session")
def smollm2_engine(smollm2_bundles: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both in fp32."""
    from real_cases import build

    def make(folder: Path) -> Path:
        return build(smollm2_bundles, folder / "engine", "none", "auto")

    return made_once(tmp_path_factory, "smollm2_engine", make)


Command = Callable[..., subprocess.CompletedProcess]
_started: set[str] = set()  # commands


@pytest.fixture
def command() -> Command:
    """Run one of the installed commands and return what it printed.

    The first run of a command starts a process as users do; later ones are forks of another.
    """

    def run(name: str, *arguments: object, **options: object) -> subprocess.CompletedProcess:
        if name in _started and not options and forks.is_usual():
            return forks.shared().run(name, *arguments)
        _started.add(name)
        script = Path(sys.executable).parent / name
        return subprocess.run(
            [script, *map(str, arguments)], capture_output=True, text=True, check=False, **options
        )

    return run


@pytest.fixture
def command_here() -> Command:
    """As `command`, in this process, for tests that need no separate one.

    Half of the time of a short command is the start of a process. Others of the same command start
    it as users do.
    """

    def run(name: str, *arguments: object) -> subprocess.CompletedProcess:
        app = importlib.import_module(MODULES[name]).app
        out, errors, code = io.StringIO(), io.StringIO(), 0
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
            try:
                app([*map(str, arguments)])
            except SystemExit as ended:
                code = int(ended.code or 0)
            except (EdgeLLMError, OSError) as error:
                message, hint, code = explain(error)
                print(f"error: {message}\nhint: {hint}", file=errors)
        return subprocess.CompletedProcess([], code, out.getvalue(), errors.getvalue())

    return run


@pytest.fixture
def infer_requests(command, tmp_path):
    """Write a request file, run `llm_inference`, read its outputs; None: it wrote none."""
    return _inference(command, tmp_path)


@pytest.fixture
def infer_here(command_here, tmp_path):
    """As `infer_requests`, in this process."""
    return _inference(command_here, tmp_path)


def _inference(command: Command, folder: Path) -> Callable[..., tuple]:
    def run(engine, content, *flags):
        source, output = folder / "in.json", folder / "out.json"
        source.write_text(content if isinstance(content, str) else json.dumps(content))
        output.unlink(missing_ok=True)
        written = () if "--prove" in flags else ("--outputFile", output)
        given = ("--engineDir", engine, "--inputFile", source, *written, *flags)
        result = command("llm_inference", *given)
        answers = json.loads(output.read_text())["responses"] if output.exists() else None
        return result, answers

    return run


def assert_one_line_error(result: subprocess.CompletedProcess, *fragments: str) -> None:
    """Exit code not 0, `error:` and perhaps `hint:` on stderr, no traceback, the fragments."""
    assert result.returncode != 0
    assert "Traceback" not in result.stderr
    lines = [line for line in result.stderr.splitlines() if line.startswith("error:")]
    assert len(lines) == 1, result.stderr
    for fragment in fragments:
        assert fragment in result.stderr


def interrupt(command: list[object], folder: Path, appears: str) -> tuple[int, list[str]]:
    """Run a command, press Ctrl-C as soon as `appears` matches in `folder`.

    The last line must be the same command, by which it goes on.

    Returns:
        The exit code and the other lines of stderr.
    """
    script = Path(sys.executable).parent / str(command[0])
    arguments = [str(argument) for argument in command[1:]]
    process = subprocess.Popen([script, *arguments], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 300
    while not list(folder.glob(appears)):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.002)
    process.send_signal(signal.SIGINT)
    _, printed = process.communicate(timeout=300)
    *lines, last = printed.splitlines()
    assert last == f"hint: the same command goes on: {shlex.join([script.name, *arguments])}"
    return process.returncode, lines


INTERRUPTED = (130, ["error: interrupted; nothing half-written was left"])


def limit_file_size() -> None:
    """Let files of this process grow to 100 kB at most, as a full disk would."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
