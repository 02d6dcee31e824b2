// Calls functions after a delay.
#ifndef WRAPOPT_CC_PROTOCOLS_DEADLINE_TIMER_H_
#define WRAPOPT_CC_PROTOCOLS_DEADLINE_TIMER_H_

#include <pthread.h>

#include <chrono>  // NOLINT(build/c++11)
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>  // NOLINT(build/c++11)
#include <utility>

namespace wrapopt {

class Timer {
 public:
  using Id = uint64_t;

  virtual ~Timer() = default;

  // Calls `ring` after `seconds`, in another thread and without a lock.
  virtual Id Set(double seconds, std::function<void()> ring) = 0;

  // Has no effect on a call that has started or is about to start.
  virtual void Cancel(Id id) = 0;
};

// A timer with one thread. The process has one, which is never destroyed: at
// the end of the process the thread may still be sleeping in it.
class DeadlineTimer : public Timer {
 public:
  static DeadlineTimer& Get();

  Id Set(double seconds, std::function<void()> ring) override;
  void Cancel(Id id) override;

 private:
  // CLOCK_MONOTONIC, the clock of `earlier_`.
  using Clock = std::chrono::steady_clock;
  using Deadline = std::pair<Clock::time_point, Id>;

  DeadlineTimer();

  [[noreturn]] void Run();

  std::mutex mu_;
  // Not std::condition_variable, which needs a glibc newer than 2.27.
  pthread_cond_t earlier_;
  std::map<Deadline, std::function<void()>> set_;
  std::map<Id, Clock::time_point> times_;
  Id next_ = 0;
  bool running_ = false;
};

}  // namespace wrapopt

#endif  // WRAPOPT_CC_PROTOCOLS_DEADLINE_TIMER_H_
