// Huge pages for arrays of which a step uses a few rows. Does not depend on
// TensorFlow.
#ifndef WRAPOPT_CC_KERNELS_HUGE_PAGES_H_
#define WRAPOPT_CC_KERNELS_HUGE_PAGES_H_

#include <cstddef>

namespace wrapopt {

// Moves a large array to huge pages, which makes the first access to a row
// faster: without them, most of its time is the search for the row's page. A
// thread in the background does it, with at most half of its time, and holds no
// lock: the array may change or be freed meanwhile. Nothing happens if the
// array is small or is there already, if the system cannot do it, or if the
// environment variable WRAPOPT_HUGE_PAGES is "off".
void UseHugePages(void* data, size_t bytes);

}  // namespace wrapopt

#endif  // WRAPOPT_CC_KERNELS_HUGE_PAGES_H_
