// Huge pages for large arrays of which a step uses only a few rows. Does not
// depend on TensorFlow.
#ifndef WRAPOPT_CC_ENGINE_HUGE_PAGES_H_
#define WRAPOPT_CC_ENGINE_HUGE_PAGES_H_

#include <cstddef>

namespace wrapopt {

// Moves an array to huge pages. This makes the first access to a row faster,
// because most of its time is the search for the row's page.
//
// A background thread moves the array, and sleeps half of the time. It holds no
// lock. The array may be written or freed meanwhile. The function does nothing
// if the array is small or has huge pages already, if the system does not
// support them, or if the environment variable WRAPOPT_HUGE_PAGES is "off".
void UseHugePages(void* data, size_t bytes);

}  // namespace wrapopt

#endif  // WRAPOPT_CC_ENGINE_HUGE_PAGES_H_
