#include "cc/kernels/crc32c.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace wrapopt {
namespace {

constexpr std::array<uint32_t, 256> kTable = [] {
  std::array<uint32_t, 256> table = {};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) {
      crc = crc >> 1 ^ (crc & 1 ? 0x82f63b78u : 0);
    }
    table[byte] = crc;
  }
  return table;
}();

uint32_t ByTable(uint32_t crc, const unsigned char* data, size_t bytes) {
  for (size_t i = 0; i < bytes; ++i) {
    crc = crc >> 8 ^ kTable[(crc ^ data[i]) & 0xff];
  }
  return crc;
}

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) uint32_t ByInstruction(
    uint32_t crc, const unsigned char* data, size_t bytes) {
  uint64_t wide = crc;
  for (; bytes >= 8; data += 8, bytes -= 8) {
    uint64_t word;
    std::memcpy(&word, data, sizeof(word));
    wide = _mm_crc32_u64(wide, word);
  }
  return ByTable(static_cast<uint32_t>(wide), data, bytes);
}
#endif

}  // namespace

uint32_t Crc32c(uint32_t crc, const void* data, size_t bytes, Isa isa) {
  const auto* const from = static_cast<const unsigned char*>(data);
  crc = ~crc;
#if defined(__x86_64__)
  // The instruction is part of x86-64-v2.
  if (isa != Isa::kBaseline) return ~ByInstruction(crc, from, bytes);
#endif
  return ~ByTable(crc, from, bytes);
}

}  // namespace wrapopt
