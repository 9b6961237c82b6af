"""Plans without weights: what `load_engine` asks a library, and the error of each failure."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edgellm.core.errors import BrokenArtifactError, EdgeLLMError, LimitError
from edgellm.core.manifest import FileRecord
from edgellm.device_runtime.runners import tensorrt
from edgellm.device_runtime.runners.tensorrt.cuda import driver
from edgellm.device_runtime.runners.tensorrt.library import refit as refit_module
from edgellm.device_runtime.runners.tensorrt.library import runtime

VERSION = "10.13.3.9"


class _Logger:
    Severity = SimpleNamespace(ERROR=1, INTERNAL_ERROR=0, WARNING=2)


class Board:
    """A library with an engine without tensors, and the GPU that it runs on."""

    def __init__(
        self,
        *,
        missing: tuple[str, ...] = (),
        said: str = "",  # by the parser, which does not take the file
        logged: str = "",  # by the library, which does not take the weights
        loads: bool = True,
    ) -> None:
        self.calls: list[Any] = []
        self.is_current, self.alive = False, set()
        self._missing, self._said, self._logged, self._loads = missing, said, logged, loads
        engine = SimpleNamespace(num_io_tensors=0, create_execution_context=self._context)
        self.engine = engine
        self.trt: Any = SimpleNamespace(
            __name__="tensorrt",
            __version__=VERSION,
            ILogger=_Logger,
            Runtime=lambda _: SimpleNamespace(deserialize_cuda_engine=self._deserialize),
            Refitter=self._refitter,
            OnnxParserRefitter=self._parser,
            ExecutionContextAllocationStrategy=SimpleNamespace(USER_MANAGED=0),
        )
        self.stream = 7

    @contextmanager
    def current(self):
        self.is_current = True
        yield
        self.is_current = False

    def synchronize_all(self) -> None:
        self.calls.append("synchronize")

    def free_bytes(self) -> int:
        return 100

    def _deserialize(self, plan: Any) -> Any:
        assert self.is_current
        self.calls.append(bytes(plan))
        return self.engine if self._loads else None

    def _refitter(self, engine: Any, logger: Any) -> Any:
        assert self.is_current
        assert engine is self.engine
        self._log = logger
        return _Refitter(self)

    def _parser(self, refitter: Any, logger: Any) -> Any:
        assert logger is self._log
        assert refitter.board is self
        return _Parser(self)

    def _context(self, _strategy: Any) -> Any:
        self.calls.append("context")
        return SimpleNamespace(
            set_device_memory=lambda *_: None, set_optimization_profile_async=lambda *_: True
        )

    def load(self, plan: Path, *, is_stripped: bool = True) -> Any:
        kernels = plan.with_name("kernels")
        return runtime.load_engine(self.trt, plan, self, {}, kernels, is_stripped=is_stripped)  # type: ignore[arg-type] - a fake device


class _Living:
    """An object of the library, whose place in memory the board knows."""

    def __init__(self, board: Board) -> None:
        self.board = board
        board.alive.add(type(self))

    def __del__(self) -> None:
        self.board.alive.discard(type(self))


class _Refitter(_Living):
    def get_missing_weights(self) -> list[str]:
        return [*self.board._missing]

    def refit_cuda_engine(self) -> bool:
        assert self.board.is_current
        assert _Parser in self.board.alive  # weights live with it
        self.board.calls.append("refit")
        if self.board._logged:
            self.board._log.log(1, self.board._logged)
        return not self.board._logged


class _Parser(_Living):
    def __del__(self) -> None:
        assert _Refitter in self.board.alive  # it refers to it
        super().__del__()

    @property
    def num_errors(self) -> int:
        return len(self.board._said) and 1

    def get_error(self, index: int) -> Any:
        assert index == 0
        return SimpleNamespace(desc=lambda: self.board._said)

    def refit_from_file(self, path: str) -> bool:
        self.board.calls.append(Path(path).name)
        return not (self.board._said or self.board._missing)


@pytest.fixture
def plan(tmp_path) -> Path:
    (tmp_path / "llm.lowered.onnx").write_bytes(b"graph")
    (tmp_path / "llm.lowered.data").write_bytes(b"weights")
    (tmp_path / "llm.engine").write_bytes(b"plan")
    return tmp_path / "llm.engine"


def test_an_engine_gets_its_weights_before_it_has_a_context(plan):
    board = Board()
    loaded = board.load(plan)
    assert board.calls == [b"plan", "llm.lowered.onnx", "refit"]
    assert board.alive == set()  # the copy of the weights is freed
    loaded.new_context(0, SimpleNamespace(address=1, num_bytes=1))
    assert board.calls[3:] == ["context", "synchronize"]


def test_other_plans_are_not_refitted(plan):
    board = Board()
    board.load(plan, is_stripped=False)
    assert board.calls == [b"plan"]


@pytest.mark.parametrize(
    ("board", "said"),
    [
        (Board(missing=("a", "", "b", "c")), r"4 are missing \(a, one without a name, b, \.\.\.\)"),
        (Board(missing=("a",)), r"1 are missing \(a\)"),
        (Board(said="Failed to parse\nthe model"), "Failed to parse the model"),
        (Board(logged="out of\nmemory"), "out of memory"),
    ],
)
def test_a_failed_refit_is_one_line(plan, board, said):
    with pytest.raises(BrokenArtifactError, match=f"does not take the weights.*: {said}") as caught:
        board.load(plan)
    assert "\n" not in str(caught.value)
    assert VERSION in str(caught.value)
    assert "without --stripWeights" in caught.value.hint
    assert ("refit" in board.calls) == bool(board._logged)  # never with weights missing


@pytest.mark.parametrize("name", ["llm.lowered.onnx", "llm.lowered.data"])
def test_a_missing_file_is_named(plan, name):
    (plan.parent / name).unlink()
    with pytest.raises(BrokenArtifactError, match=f"{name} is missing: llm.engine has no weights"):
        Board().load(plan)


def test_a_plan_that_cannot_be_loaded_is_not_refitted(plan):
    board = Board(loads=False)
    with pytest.raises(BrokenArtifactError, match="cannot load"):
        board.load(plan)
    assert board.calls == [b"plan"]


def test_the_refitters_copy_must_fit_into_memory(plan, monkeypatch):
    monkeypatch.setattr(refit_module, "available_memory_bytes", lambda: 6)
    with pytest.raises(LimitError, match="is given its weights while it is loaded") as caught:
        Board().load(plan)
    assert "without --stripWeights" in caught.value.hint


@pytest.mark.parametrize("is_stripped", [True, False])
def test_the_manifest_says_which_plans_are_refitted(plan, monkeypatch, is_stripped):
    """By its list of files, whose sizes the GPU's memory must hold."""
    board, asked = Board(), []
    names = ["llm.engine", *(["llm.lowered.onnx", "llm.lowered.data"] if is_stripped else ())]
    graph = SimpleNamespace(path="llm.engine")
    engine: Any = SimpleNamespace(
        graphs={"encoder": (graph,)},
        files={name: FileRecord(40, "0" * 64) for name in names},
        cache=None,
        cache_of=lambda _: None,
        spec=None,
        max_kv_cache_capacity=0,
        max_batch_size=1,
    )
    monkeypatch.setattr(tensorrt, "_require_origin", lambda *_: board.trt)
    monkeypatch.setattr(driver, "open_device", lambda: board)
    monkeypatch.setattr(tensorrt, "runner_of", lambda *given: asked.append(given))
    tensorrt.open_engine(plan.parent, engine)
    assert len(asked) == 1
    assert ("refit" in board.calls) == is_stripped
    with pytest.raises(EdgeLLMError, match=r"needs 0\.00 GB") if is_stripped else _nothing():
        tensorrt.require_memory(79, engine)


@contextmanager
def _nothing():
    yield
