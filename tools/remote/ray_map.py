"""Rows of work over a Ray cluster, or over the cores of this machine; results as they come."""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from edgellm.core.errors import EdgeLLMError

_AT_A_SERVER = 2  # requests: one is answered, one waits
Work = Callable[[dict[str, Any]], dict[str, Any]]


def require_ray() -> None:
    """Raise `EdgeLLMError` where Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise EdgeLLMError("--ray needs Ray", hint="in edgellm's folder: pip install '.[ray]'")


def spread(rows: Sequence[dict[str, Any]], work: Work, num_servers: int) -> Iterator[dict]:
    """`work` of each row, in the order in which they are done.

    Ray does a row again whose process or machine was lost, and takes new rows to where there is
    room. `RAY_ADDRESS` names a cluster; without it one is started
    here, and ended with the work.

    Args:
        rows: of JSON.
        work: takes a row and gives one; it, and what it needs, can be imported everywhere.
        num_servers: that answer at the same time.

    Raises:
        EdgeLLMError: what `work` raised.
    """
    # An optional package, without types.
    ray: Any = importlib.import_module("ray")
    importlib.import_module("ray.data")
    ray.init(log_to_driver=False, logging_level=logging.ERROR, ignore_reinit_error=True)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    texts = [{"row": json.dumps(row)} for row in rows]
    # A block for each row: a finished one need not wait for another, a lost one is one.
    data = ray.data.from_items(texts, override_num_blocks=len(texts)).map(
        _Done(work),
        compute=ray.data.TaskPoolStrategy(size=_AT_A_SERVER * num_servers),
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


class _Done:
    """`work` on rows as text, since a table's columns have one type."""

    def __init__(self, work: Work) -> None:
        self._work = work

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        return {"row": json.dumps(self._work(json.loads(row["row"])))}
