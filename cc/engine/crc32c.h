// The checksum of TensorFlow's checkpoints. Does not depend on TensorFlow.
#ifndef WRAPOPT_CC_ENGINE_CRC32C_H_
#define WRAPOPT_CC_ENGINE_CRC32C_H_

#include <cstddef>
#include <cstdint>

#include "cc/engine/isa.h"

namespace wrapopt {

// Continues a CRC-32C (RFC 3720, appendix B.4) with more bytes. `crc` is the
// checksum of the bytes before, 0 for none.
uint32_t Crc32c(uint32_t crc, const void* data, size_t bytes, Isa isa);

}  // namespace wrapopt

#endif  // WRAPOPT_CC_ENGINE_CRC32C_H_
