// Checks arrays of more than 2^32 elements (2^31 if memory does not suffice),
// and arrays that lie farther apart than a table can tell.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "cc/engine/number.h"
#include "cc/gpu/check/device.h"
#include "cc/gpu/launcher.h"

namespace wrapopt {
namespace gpu {
namespace {

constexpr size_t kReserve = size_t{1} << 30;
constexpr uint64_t kSpace = 4096;  // Bytes after an array.

// Copies bfloat16 arrays of `elements` from each value to its average.
void CopyToAverages(uint64_t elements, const std::vector<Address>& addresses) {
  Update update;
  update.sources = {{1, Number::kBfloat16}};
  update.targets = {{1, Number::kBfloat16}};
  update.arrays = 2;
  update.elements.assign(addresses.size() / 2, elements);
  update.addresses = addresses;
  Run(update);
  Wait();
}

void Fill(Address address, uint64_t bytes, unsigned char with) {
  Call("cuMemsetD8_v2", address, with, size_t{bytes});
}

// Whether an average is a copy of its value, and nothing after it has changed.
bool IsCopy(Address average, uint64_t elements) {
  std::vector<char> got(2 * elements + kSpace);
  Call("cuMemcpyDtoH_v2", static_cast<void*>(got.data()), average, got.size());
  const auto end = got.begin() + 2 * elements;
  return std::count(got.begin(), end, 0x3c) == end - got.begin() &&
         std::count(end, got.end(), 0) == got.end() - end;
}

// Prints a verdict; returns whether nothing is wrong.
bool Tell(const std::string& what, bool right) {
  std::printf("%s: %s\n", right ? "right" : "WRONG", what.c_str());
  return right;
}

bool CheckHuge() {
  const auto bytes_of = [](uint64_t elements) { return 2 * elements + kSpace; };
  uint64_t elements = 0;
  for (const int log2 : {31, 32}) {
    const uint64_t more = (uint64_t{1} << log2) + 12345;
    if (FreeMemory() > 2 * bytes_of(more) + kReserve) elements = more;
  }
  if (elements == 0) {
    std::printf("NOT CHECKED: huge arrays need 10 GB of memory\n");
    return true;
  }
  const size_t bytes = bytes_of(elements);
  const Array shadow(bytes), value(bytes);
  Fill(shadow.address(), bytes, 0);
  Fill(value.address(), bytes, 0x3c);
  CopyToAverages(elements, {value.address(), shadow.address()});
  return Tell("arrays of " + std::to_string(elements) + " elements",
              IsCopy(shadow.address(), elements));
}

bool CheckFar() {
  constexpr size_t kBytes = (size_t{17} << 30) + 4096;
  if (FreeMemory() < kBytes + kReserve) {
    std::printf("NOT CHECKED: arrays 17 GiB apart need 18 GiB of memory\n");
    return true;
  }
  constexpr uint64_t kElements = 999;
  const Array buffer(kBytes);
  std::vector<Address> addresses, averages;
  for (const uint64_t begin : {size_t{0}, kBytes - 4 * kSpace}) {
    const Address value = buffer.address() + begin;
    averages.push_back(value + 2 * kSpace);
    addresses.insert(addresses.end(), {value, averages.back()});
    Fill(value, 4 * kSpace, 0);
    Fill(value, 2 * kElements, 0x3c);
  }
  CopyToAverages(kElements, addresses);
  return Tell("arrays 17 GiB apart",
              IsCopy(averages[0], kElements) & IsCopy(averages[1], kElements));
}

}  // namespace
}  // namespace gpu
}  // namespace wrapopt

// An argument, "huge" or "far", chooses a check.
int main(int argc, char** argv) {
  const std::string only = argc > 1 ? argv[1] : "";
  wrapopt::gpu::Start();
  bool right = only == "far" || wrapopt::gpu::CheckHuge();
  right &= only == "huge" || wrapopt::gpu::CheckFar();
  return right ? 0 : 1;
}
