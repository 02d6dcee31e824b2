// Huge pages for arrays of which a step uses a few rows.
#ifndef WRAPOPT_CC_KERNELS_HUGE_PAGES_H_
#define WRAPOPT_CC_KERNELS_HUGE_PAGES_H_

#include <cstddef>
#include <cstdint>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace wrapopt {

// Moves a large array to huge pages. The search for a page then takes less time:
// without them, it is most of the time of the first access to a row. It changes
// nothing if the system has none, and takes little time if the array is there.
inline void UseHugePages(void* data, size_t bytes) {
#if defined(__linux__)
  // The processor remembers where the pages of a smaller array are.
  constexpr size_t kLeast = 16 << 20;
  constexpr uintptr_t kPage = 2 << 20;
  // Since Linux 6.1; the headers may be older.
  constexpr int kCollapse = 25;
  if (bytes < kLeast) return;
  const uintptr_t begin =
      (reinterpret_cast<uintptr_t>(data) + kPage - 1) / kPage * kPage;
  const uintptr_t end =
      (reinterpret_cast<uintptr_t>(data) + bytes) / kPage * kPage;
  (void)madvise(reinterpret_cast<void*>(begin), end - begin, kCollapse);
#endif
}

}  // namespace wrapopt

#endif  // WRAPOPT_CC_KERNELS_HUGE_PAGES_H_
