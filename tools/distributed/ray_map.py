"""Maps work over a Ray cluster or this machine; yields results as they finish."""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from edgellm.core.commands.extras import install
from edgellm.core.errors import EdgeLLMError

_PER_SERVER = 2  # requests: one runs, one waits
Work = Callable[[dict[str, Any]], dict[str, Any]]


def require_ray() -> None:
    """Raise `EdgeLLMError` if Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise EdgeLLMError("--ray needs Ray", hint=install("ray"))


def spread(rows: Sequence[dict[str, Any]], work: Work, num_servers: int) -> Iterator[dict]:
    """Apply `work` to each row; yield results as they finish.

    Ray repeats rows of lost processes and machines. `RAY_ADDRESS` names a cluster; without it,
    a local one is started, and ended with the work.

    Args:
        rows: JSON objects.
        work: function of a row; must be importable on all machines of the cluster.
        num_servers: number of servers that run requests concurrently.

    Raises:
        EdgeLLMError: raised by `work`.
    """
    # An optional package, without types.
    ray: Any = importlib.import_module("ray")
    importlib.import_module("ray.data")
    ray.init(log_to_driver=False, logging_level=logging.ERROR, ignore_reinit_error=True)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    texts = [{"row": json.dumps(row)} for row in rows]
    # One block per row: results do not wait for each other, and a loss repeats one row only.
    data = ray.data.from_items(texts, override_num_blocks=len(texts)).map(
        _OnText(work),
        compute=ray.data.TaskPoolStrategy(size=_PER_SERVER * num_servers),
        num_cpus=0.1,  # they wait for servers
    )
    try:
        for done in data.iter_rows():
            yield json.loads(done["row"])
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        raise cause if isinstance(cause, EdgeLLMError) else error from None
    finally:
        ray.shutdown()


class _OnText:
    """Applies `work` to rows as JSON text, since a column of a Ray table has one type."""

    def __init__(self, work: Work) -> None:
        self._work = work

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        return {"row": json.dumps(self._work(json.loads(row["row"])))}
