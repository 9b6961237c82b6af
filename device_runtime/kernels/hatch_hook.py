"""Adds the compiled kernels to a wheel; without a compiler the wheel is pure Python.

EDGELLM_KERNELS=0 omits the kernels. Editable installs compile at first use. CXX may name a cross
compiler: the wheel is for the processor that it compiles for.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_NO_LINK = (
    "{0} is no link to the repository, since git has core.symlinks=false; an editable install "
    "needs it: ln -sfn .. {0} (pip install . needs no link)"
)


def _compile_module() -> ModuleType:
    """compile.py by its path: the package is not installed while it is built."""
    path = Path(__file__).with_name("compile.py")
    spec = importlib.util.spec_from_file_location("edgellm_kernels_compile", path)
    assert spec is not None and spec.loader is not None  # noqa: PT018
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class KernelHook(BuildHookInterface):
    """The build hook in `tool.hatch.build.targets.wheel.hooks.custom`."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and tag the wheel with this platform, for any Python.

        Raises:
            NotADirectoryError: git wrote the link of an editable install as a file.
        """
        link = Path(self.root, ".src", "edgellm")
        if version == "editable" and not link.is_dir():
            raise NotADirectoryError(_NO_LINK.format(link))
        compiling = _compile_module()
        cxx = compiling.compiler()
        if version == "editable" or cxx is None or os.environ.get("EDGELLM_KERNELS") == "0":
            return
        try:
            machine = compiling.machine_of(cxx)
            library = compiling.cached_library(cxx, machine)
        except (compiling.NoCompilerError, OSError) as error:
            self.app.display_warning(f"the kernels are left out: {str(error).splitlines()[0]}")
            return
        inside = f"device_runtime/kernels/prebuilt/{compiling.LIBRARY}"
        build_data["force_include"][str(library)] = inside  # "edgellm/" is put before it
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{_platform_tag(machine)}"


def _platform_tag(machine: str) -> str:
    """This platform, or Linux on another processor."""
    own = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    return own if machine == platform.machine() else f"linux_{machine}"
