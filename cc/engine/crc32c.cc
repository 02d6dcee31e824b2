#include "cc/engine/crc32c.h"

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
// Bytes of one of the three chains of instructions that run at a time: each
// takes three cycles, and one can begin in each cycle.
constexpr size_t kChain = 2048;

// The contribution of each byte of a checksum to the checksum after kChain more
// bytes of 0.
constexpr std::array<std::array<uint32_t, 256>, 4> kAfterZeros = [] {
  std::array<std::array<uint32_t, 256>, 4> tables = {};
  for (int bit = 0; bit < 32; ++bit) {
    uint32_t crc = uint32_t{1} << bit;
    for (size_t i = 0; i < kChain; ++i) crc = crc >> 8 ^ kTable[crc & 0xff];
    for (uint32_t byte = 0; byte < 256; ++byte) {
      if (byte >> bit % 8 & 1) tables[bit / 8][byte] ^= crc;
    }
  }
  return tables;
}();

uint32_t AfterZeros(uint64_t crc) {
  return kAfterZeros[0][crc & 0xff] ^ kAfterZeros[1][crc >> 8 & 0xff] ^
         kAfterZeros[2][crc >> 16 & 0xff] ^ kAfterZeros[3][crc >> 24 & 0xff];
}

uint64_t Word(const unsigned char* data) {
  uint64_t word;
  std::memcpy(&word, data, sizeof(word));
  return word;
}

__attribute__((target("sse4.2"))) uint32_t ByInstruction(
    uint32_t crc, const unsigned char* data, size_t bytes) {
  uint64_t first = crc;
  for (; bytes >= 3 * kChain; data += 3 * kChain, bytes -= 3 * kChain) {
    uint64_t second = 0, third = 0;
    for (const unsigned char* at = data; at < data + kChain; at += 8) {
      first = _mm_crc32_u64(first, Word(at));
      second = _mm_crc32_u64(second, Word(at + kChain));
      third = _mm_crc32_u64(third, Word(at + 2 * kChain));
    }
    // A checksum is linear in its start and in the bytes.
    first = AfterZeros(AfterZeros(first) ^ second) ^ third;
  }
  for (; bytes >= 8; data += 8, bytes -= 8) {
    first = _mm_crc32_u64(first, Word(data));
  }
  return ByTable(static_cast<uint32_t>(first), data, bytes);
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
