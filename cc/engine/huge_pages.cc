#include "cc/engine/huge_pages.h"

#if defined(__linux__)
#include <sys/mman.h>

#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <iterator>
#include <map>
#include <mutex>
#include <thread>
#include <utility>
#endif

namespace wrapopt {

#if defined(__linux__)
namespace {

using Clock = std::chrono::steady_clock;

constexpr uintptr_t kPage = 2 << 20;

bool IsOn() {
  const char* const value = std::getenv("WRAPOPT_HUGE_PAGES");
  if (value == nullptr || std::strcmp(value, "on") == 0) return true;
  if (std::strcmp(value, "off") != 0) {
    std::fprintf(stderr,
                 "wrapopt: WRAPOPT_HUGE_PAGES must be 'on' or 'off', got '%s': "
                 "it is off.\n",
                 value);
  }
  return false;
}

// Moves ranges of addresses to huge pages, one after the other.
class Mover {
 public:
  void Add(uintptr_t begin, uintptr_t end) {
    // Each step asks for the same ranges again. But after some time, a range
    // may belong to a new array.
    constexpr std::chrono::seconds kInterval(60);
    constexpr size_t kMostRanges = 1024;

    const std::lock_guard<std::mutex> lock(mu_);
    if (!is_on_) return;
    const Clock::time_point now = Clock::now();
    for (auto i = asked_.begin(); i != asked_.end();) {
      i = now - i->second > kInterval ? asked_.erase(i) : std::next(i);
    }
    if (asked_.size() >= kMostRanges ||
        !asked_.emplace(std::pair(begin, end), now).second) {
      return;
    }
    ranges_.emplace_back(begin, end);
    if (is_running_) return;
    is_running_ = true;
    std::thread([this] { Run(); }).detach();
  }

 private:
  void Run() {
    for (;;) {
      std::pair<uintptr_t, uintptr_t> range;
      {
        const std::lock_guard<std::mutex> lock(mu_);
        if (ranges_.empty() || !is_on_) {
          is_running_ = false;
          return;
        }
        range = ranges_.front();
        ranges_.pop_front();
      }
      for (uintptr_t page = range.first; page < range.second; page += kPage) {
        const Clock::time_point begin = Clock::now();
        if (!Move(page)) break;
        std::this_thread::sleep_for(Clock::now() - begin);
      }
    }
  }

  // Returns false if the rest of the range cannot be moved either.
  bool Move(uintptr_t page) {
    // Since Linux 6.1; the headers may be older.
    constexpr int kCollapse = 25;
    if (madvise(reinterpret_cast<void*>(page), kPage, kCollapse) == 0) {
      return true;
    }
    if (errno == EINVAL) {
      const std::lock_guard<std::mutex> lock(mu_);
      is_on_ = false;  // The system is older.
    }
    // The array may have been freed, or the system may have no huge page left.
    return errno == EAGAIN || errno == EBUSY;
  }

  std::mutex mu_;
  bool is_on_ = IsOn();
  bool is_running_ = false;
  std::deque<std::pair<uintptr_t, uintptr_t>> ranges_;
  std::map<std::pair<uintptr_t, uintptr_t>, Clock::time_point> asked_;
};

}  // namespace

void UseHugePages(void* data, size_t bytes) {
  // The processor remembers where the pages of a smaller array are.
  constexpr size_t kLeast = 16 << 20;
  if (bytes < kLeast) return;
  // Never deleted: its thread may run while the process ends.
  static Mover& mover = *new Mover;
  const uintptr_t address = reinterpret_cast<uintptr_t>(data);
  mover.Add((address + kPage - 1) / kPage * kPage,
            (address + bytes) / kPage * kPage);
}

#else

void UseHugePages(void*, size_t) {}

#endif

}  // namespace wrapopt
