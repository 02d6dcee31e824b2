#define WRAPOPT_LARGE
#include "cc/gpu/elementwise.cu"
