"""Output files of `llm_inference`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgellm.core.artifact import check_output_file, replace_file
from edgellm.core.errors import EdgeLLMError
from edgellm.device_runtime.engine.profile import Profile
from edgellm.device_runtime.request_files.resume import UnfinishedRun, path_of
from edgellm.device_runtime.request_files.tree_log import trees_as_json


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """Paths of the output files of a run."""

    source: Path | None  # the request file
    answers: Path | None  # None: they are printed only
    profile: Path | None
    trees: Path | None

    def check(self, engine_dir: Path) -> None:
        """Reject paths that cannot be written, before the run."""
        paths = [path for path in (self.answers, self.profile, self.trees) if path is not None]
        for path in paths:
            check_output_file(path, *([] if self.source is None else [self.source]))
            if path.resolve().parent == engine_dir.resolve():
                raise EdgeLLMError(f"{path} lies in the engine's folder", hint="write elsewhere")
        if self.answers is not None:
            paths.append(path_of(self.answers))
        if len({path.resolve() for path in paths}) < len(paths):
            raise EdgeLLMError("the outputs, the profile and the trees must go to different files")

    def write(self, run: UnfinishedRun, profile: Profile) -> None:
        """Write the files for the finished outputs."""
        found = run.in_order()
        responses = [answered.response for answered in found]
        source = None if self.source is None else str(self.source)
        if self.answers is not None:
            _write_json(self.answers, {"input_file": source, "responses": responses})
        if self.trees is not None:
            rounds = {answered.index: answered.rounds for answered in found}
            _write_json(self.trees, trees_as_json(source or "--prompt", rounds))
        if self.profile is not None:
            _write_json(self.profile, profile.as_json())


def _write_json(path: Path, content: Any) -> None:
    replace_file(path, json.dumps(content, indent=4, ensure_ascii=False) + "\n")
