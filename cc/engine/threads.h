// Divides a kernel's work among the threads of TensorFlow or of an XLA program.
// Does not depend on either.
#ifndef WRAPOPT_CC_ENGINE_THREADS_H_
#define WRAPOPT_CC_ENGINE_THREADS_H_

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>

#include "cc/engine/elementwise.h"
#include "cc/engine/notification.h"
#include "cc/engine/subnormals.h"

namespace wrapopt {

// A pool of threads.
class Threads {
 public:
  virtual int64_t count() const = 0;
  // Runs `task` once a thread is free.
  virtual void Schedule(std::function<void()> task) const = 0;

 protected:
  ~Threads() = default;
};

// Runs `work` on ranges that together are [0, units). This thread runs all of
// it if it is little.
template <class Work>
void RunParallel(const Threads& threads, int64_t units,
                 int64_t cycles_per_unit, const Work& work) {
  // The least cost of work that is worth waking threads for, and the cost of a
  // range: short, so that all threads end at about the same time.
  constexpr int64_t kCyclesToShare = 200000;
  constexpr int64_t kCyclesPerRange = 200000;
  cycles_per_unit = std::max<int64_t>(1, cycles_per_unit);
  if (units == 0) return;
  const FlushSubnormals flush;  // Once, rather than in each call of a loop.
  if (units * cycles_per_unit < kCyclesToShare) return work(0, units);
  const int64_t range = std::max<int64_t>(1, kCyclesPerRange / cycles_per_unit);
  const int64_t tasks =
      std::min<int64_t>(threads.count(), (units + range - 1) / range);
  // This thread and the pool's threads each take the next range. A thread that
  // begins late, because the pool is busy or slow to wake, takes fewer. This
  // thread waits only for ranges that were taken, not for tasks that have not
  // begun: all threads of the pool may be waiting here.
  struct Shared {
    std::atomic<int64_t> next{0};
    std::atomic<int64_t> left;
    Notification done;
  };
  const auto shared = std::make_shared<Shared>();
  shared->left = units;
  // `work` exists as long as there are ranges left.
  const auto take = [shared, units, range, &work] {
    const FlushSubnormals flush;
    for (;;) {
      const int64_t begin = shared->next.fetch_add(range);
      if (begin >= units) return;
      const int64_t end = std::min(begin + range, units);
      work(begin, end);
      if (shared->left.fetch_sub(end - begin) == end - begin) {
        shared->done.Notify();
      }
    }
  };
  for (int64_t task = 1; task < tasks; ++task) threads.Schedule(take);
  take();
  shared->done.Wait();
}

inline void RunPass(const Threads& threads, const Pass& pass) {
  // The memory traffic of a core per cycle while another core is busy.
  constexpr double kBytesPerCycle = 8;
  if (pass.blocks() == 0 || pass.is_idle()) return;
  RunParallel(threads, pass.blocks(),
              static_cast<int64_t>(pass.bytes() / pass.blocks() /
                                   kBytesPerCycle),
              [&pass](int64_t begin, int64_t end) { pass.Run(begin, end); });
}

}  // namespace wrapopt

#endif  // WRAPOPT_CC_ENGINE_THREADS_H_
