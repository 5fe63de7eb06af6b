/* The same of products in bfloat16. */

#define BFLOAT16
#include "blocks.c"
