"""Kernels for NVIDIA GPUs, written in Triton and shipped as PTX.

`cache`, `attention`, `picks`, `acceptance`, `growth` and `compaction` are the sources; they need
Triton. A device reads what was compiled of them (`prebuilt`) and needs neither Triton nor a
compiler. Arguments of every kernel stand as TensorRT launches a quickly deployable plugin: inputs,
int32 sizes, outputs. Loops and masks take care of sizes, so that a grid never depends on a number
that only the device knows.
"""
