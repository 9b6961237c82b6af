"""Kernels for NVIDIA GPUs, written in Triton and shipped as PTX.

`cache`, `attention`, `recurrent`, `experts`, `picks`, `acceptance`, `growth` and `compaction` are
the sources; they need Triton. A device reads their PTX (`prebuilt`) and needs neither Triton nor a
compiler.

Arguments are in the order in which TensorRT launches a quickly deployable plugin: inputs, int32
sizes (shape before rules, as in `src/kernels.h`), outputs. Compile-time constants are last and in
capitals. A pointer's annotation is its type; `catalog` reads it. Loops and masks handle all sizes,
so a grid never depends on a number that only the device knows.
"""
