"""Kernels of edgellm's own for the CPU, as operators of ONNX Runtime.

* `src/` is the C++ library: `kernels.h` says what an instruction set must compute, `set.inl` and
  what it includes computes it once for all of them, on `vector.h`; each instruction set's file
  has the few operations that differ, `*operators.cpp` and `experts.cpp` make operators of it.
* `pack.py` writes weights as the kernels read them.
* `compile.py` and `library.py` compile the library, find it and register it with sessions.

* `triton/` has those for GPUs.

A row's bits depend neither on the rows beside it nor on threads, and are the same on every
instruction set.
"""
