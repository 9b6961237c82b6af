// The kernels of one instruction set, which the file that includes this has named `Set`.
// All of it has internal linkage: the linker must not take one set's code for another's.
#include "kernels.h"
#include "rows.inl"
#include "product.inl"
#include "attention.inl"
#include "picks.inl"
#include "recurrent.inl"
#include "low_rank.inl"

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
    append,
    attend_chunk,
    attend_rows,
    merge,
    survey,
    recall,
    advance,
    shrink,
    widen,
};
}  // namespace edgellm
