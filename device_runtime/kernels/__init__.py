"""edgellm's CPU kernels, as operators of ONNX Runtime.

* `src/` is the C++ library: `kernels.h` declares the kernels. `instruction_set.h` and its includes
  implement them once for all instruction sets, on `vector.h`; each instruction set's file has the
  operations that differ. `*operators.cpp` and `experts.cpp` wrap them as operators. `third_party/`
  has the header of ONNX Runtime's C API.
* `packed_layout.py` packs weights for the kernels.
* `compile.py` and `library.py` compile, find and register the library.
* `triton/` has the kernels for GPUs.

Results are batch-invariant, independent of threads, and bit-identical on all instruction sets.
"""
