#define WRAPOPT_PROGRAM
#include "tests/fake_gpu/emulation.h"
// Uses the macros of the above.
#include "cc/gpu/elementwise.cu"
