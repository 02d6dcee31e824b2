#include "cc/gpu/elementwise.cu"
