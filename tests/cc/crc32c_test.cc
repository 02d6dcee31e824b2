// Checksums, against the definition, one bit after the other.
#include "cc/engine/crc32c.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>

#include "cc/engine/isa.h"
#include "tests/cc/arrays.h"

namespace wrapopt {
namespace {

uint32_t BitByBit(uint32_t crc, const unsigned char* data, size_t bytes) {
  crc = ~crc;
  for (size_t i = 0; i < bytes; ++i) {
    crc ^= data[i];
    for (int bit = 0; bit < 8; ++bit) {
      crc = crc >> 1 ^ (crc & 1 ? 0x82f63b78u : 0);
    }
  }
  return ~crc;
}

Array RandomBytes(size_t bytes, size_t offset, Random* random) {
  const Array array(bytes, offset);
  for (size_t i = 0; i < bytes; ++i) {
    array.as<unsigned char>()[i] =
        static_cast<unsigned char>(Below(256, random));
  }
  return array;
}

// RFC 3720, appendix B.4.
TEST(Crc32c, OfTheStandard) {
  unsigned char up[32];
  for (int i = 0; i < 32; ++i) up[i] = static_cast<unsigned char>(i);
  const unsigned char zeros[32] = {};
  for (const Isa isa : SupportedIsas()) {
    EXPECT_EQ(Crc32c(0, zeros, 32, isa), 0x8a9136aau);
    EXPECT_EQ(Crc32c(0, up, 32, isa), 0x46dd794eu);
    EXPECT_EQ(Crc32c(0, "123456789", 9, isa), 0xe3069283u);
    EXPECT_EQ(Crc32c(0, nullptr, 0, isa), 0u);
  }
}

TEST(Crc32c, OfEachLengthAtEachAddress) {
  Random random(15);
  for (const Isa isa : SupportedIsas()) {
    for (size_t bytes = 0; bytes <= 300; ++bytes) {
      for (const size_t offset : {0, 1, 2, 3, 4, 5, 6, 7}) {
        const Array array = RandomBytes(bytes, offset, &random);
        const auto* const data = array.as<unsigned char>();
        EXPECT_EQ(Crc32c(0, data, bytes, isa), BitByBit(0, data, bytes));
      }
    }
  }
}

// Three chains of 2048 bytes run at a time.
TEST(Crc32c, CombinesItsChains) {
  constexpr size_t kChains = 3 * 2048;
  Random random(16);
  for (const Isa isa : SupportedIsas()) {
    for (const size_t bytes : {kChains - 1, kChains, kChains + 1, kChains + 8,
                               2 * kChains, 3 * kChains + 77}) {
      for (const size_t offset : {0, 3}) {
        const Array array = RandomBytes(bytes, offset, &random);
        const auto* const data = array.as<unsigned char>();
        const uint32_t want = BitByBit(7, data, bytes);
        EXPECT_EQ(Crc32c(7, data, bytes, isa), want);
        const size_t part = Below(bytes, &random);
        EXPECT_EQ(Crc32c(Crc32c(7, data, part, isa), data + part, bytes - part,
                         isa),
                  want);
      }
    }
  }
}

}  // namespace
}  // namespace wrapopt
