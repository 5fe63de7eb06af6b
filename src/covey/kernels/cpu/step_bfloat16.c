/* The same for weights and a cache in bfloat16. */

#define BFLOAT16
#include "step.c"
