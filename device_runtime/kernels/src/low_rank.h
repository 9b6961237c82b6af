// What adapters add to linear layers that read the same rows.
#pragma once

#include "operators.h"

namespace edgellm {

struct Adapted {
  OrtKernelContext* context;
  ort::Tensor x;  // [..., K]
  const float* gamma;  // [K] with which x is normalized, or nullptr
  float epsilon;
  ort::Tensor slots;  // int64: the adapter of each row; 0 is none
  ort::Tensor places;  // int64 [L, 3]: of each layer its place in the table, its outputs N and where they begin in y
  ort::Tensor weights;  // float [W]
  // int64 [slots, layers, 3]: rank (0: the adapter leaves the layer alone), offsets of A [rank, K] and B [rank, N]
  ort::Tensor table;
  int64_t width, step;  // of y; from strip to strip of a layer's outputs
};

// Whether any row has an adapter.
bool is_adapted(const ort::Tensor& slots);

// y [rows, width]: the base with what is added, or without one what is to be added: -0, which changes nothing,
// where no adapter does. False: none does to any row, and y is left alone.
bool add_low_rank(const Adapted&, const float* base, float* y);

}  // namespace edgellm
