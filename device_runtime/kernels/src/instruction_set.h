// The kernels of one instruction set, which the file that includes this has named `Set`.
// All of it has internal linkage: the linker must not take one set's code for another's.
#include "kernels.h"
#include "prologue.h"
#include "product.h"
#include "attention.h"
#include "logits.h"
#include "delta_rule.h"
#include "lora.h"

#define EDGELLM_JOIN_(a, b) a##b
#define EDGELLM_JOIN(a, b) EDGELLM_JOIN_(a, b)
#define EDGELLM_TEXT_(a) #a
#define EDGELLM_TEXT(a) EDGELLM_TEXT_(a)

namespace edgellm {
extern const Kernels EDGELLM_JOIN(k_, EDGELLM_SET);
const Kernels EDGELLM_JOIN(k_, EDGELLM_SET) = {
    EDGELLM_TEXT(EDGELLM_SET),
    prepare,
    product,
    write_kv,
    attend_chunk,
    attend_rows,
    merge,
    max_and_logsumexp,
    delta_recall,
    delta_update,
    lora_down,
    lora_up,
};
}  // namespace edgellm
