// The checksum of TensorFlow's checkpoints. Knows nothing of TensorFlow.
#ifndef WRAPOPT_CC_KERNELS_CRC32C_H_
#define WRAPOPT_CC_KERNELS_CRC32C_H_

#include <cstddef>
#include <cstdint>

#include "cc/kernels/isa.h"

namespace wrapopt {

// The CRC-32C (RFC 3720, appendix B.4) of bytes whose checksum is `crc`, 0 for
// none, followed by these.
uint32_t Crc32c(uint32_t crc, const void* data, size_t bytes, Isa isa);

}  // namespace wrapopt

#endif  // WRAPOPT_CC_KERNELS_CRC32C_H_
