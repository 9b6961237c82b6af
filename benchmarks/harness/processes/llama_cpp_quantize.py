"""llama.cpp's quantization of a GGUF file, for a python with only its package.

python benchmarks/harness/processes/llama_cpp_quantize.py SOURCE OUTPUT Q4_0 alike
"""

from __future__ import annotations

import ctypes
import sys


def main(source: str, output: str, kind: str, which: str) -> None:
    """Write `output`; all tensors "alike", or "mixed" as llama.cpp chooses."""
    import llama_cpp

    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    params.allow_requantize, params.pure = True, which == "alike"
    if llama_cpp.llama_model_quantize(source.encode(), output.encode(), ctypes.byref(params)):
        raise RuntimeError(f"llama.cpp could not write {output}")


if __name__ == "__main__":
    main(*sys.argv[1:])
