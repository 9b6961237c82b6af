#include "avx512.h"

#define EDGELLM_SET avx512_vnni
#include "instruction_set.h"
