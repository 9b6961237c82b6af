// The kernels of one instruction set.
//
// Each instruction set has a translation unit of its own, compiled with its own flags. The unit defines a class `Isa`,
// which derives from `Vector`, and one table, `make_kernels<Isa>(name)`. All kernels are templates of Isa. They and Isa
// are in unnamed namespaces, so the linker never replaces code of one set by code of another, which the processor may
// lack.
#pragma once

#include "attention.h"
#include "delta_rule.h"
#include "kernels.h"
#include "kv_cache.h"
#include "logits.h"
#include "lora.h"
#include "product.h"
#include "prologue.h"

namespace edgellm {
namespace {

template <class Isa>
constexpr Kernels make_kernels(const char* name) {
  Kernels made{};
  made.name = name;
  made.prepare = prepare<Isa>;
  made.product = product<Isa>;
  made.write_kv = write_kv<Isa>;
  made.attend_chunk = attend_chunk<Isa>;
  made.attend_rows = attend_rows<Isa>;
  made.merge = merge<Isa>;
  made.max_and_logsumexp = max_and_logsumexp<Isa>;
  made.delta_decays = delta_decays<Isa>;
  made.delta_recall = delta_recall<Isa>;
  made.delta_update = delta_update<Isa>;
  made.lora_down = lora_down<Isa>;
  made.lora_up = lora_up<Isa>;
  return made;
}

}  // namespace
}  // namespace edgellm
