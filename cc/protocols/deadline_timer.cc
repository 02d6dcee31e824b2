#include "cc/protocols/deadline_timer.h"

#include <time.h>

#include <thread>  // NOLINT(build/c++11)

#include "cc/old_glibc.h"

// The version before 2.34, which moved it to another library.
WRAPOPT_OLD_GLIBC(pthread_condattr_setclock, "2.3.3");

namespace wrapopt {

DeadlineTimer& DeadlineTimer::Get() {
  static DeadlineTimer* const timer = new DeadlineTimer;
  return *timer;
}

DeadlineTimer::DeadlineTimer() {
  pthread_condattr_t attributes;
  pthread_condattr_init(&attributes);
  pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
  pthread_cond_init(&earlier_, &attributes);
  pthread_condattr_destroy(&attributes);
}

Timer::Id DeadlineTimer::Set(double seconds, std::function<void()> ring) {
  const Clock::time_point time =
      Clock::now() + std::chrono::duration_cast<Clock::duration>(
                         std::chrono::duration<double>(seconds));
  std::lock_guard<std::mutex> lock(mu_);
  const Id id = next_++;
  const auto here = set_.emplace(Deadline(time, id), std::move(ring)).first;
  times_.emplace(id, time);
  if (!running_) {
    running_ = true;
    std::thread([this] { Run(); }).detach();
  } else if (here == set_.begin()) {
    pthread_cond_signal(&earlier_);
  }
  return id;
}

void DeadlineTimer::Cancel(Id id) {
  std::lock_guard<std::mutex> lock(mu_);
  const auto found = times_.find(id);
  if (found == times_.end()) return;
  set_.erase(Deadline(found->second, id));
  times_.erase(found);
}

void DeadlineTimer::Run() {
  std::unique_lock<std::mutex> lock(mu_);
  for (;;) {
    if (set_.empty()) {
      pthread_cond_wait(&earlier_, mu_.native_handle());
      continue;
    }
    const Deadline first = set_.begin()->first;
    if (Clock::now() < first.first) {
      const auto time = first.first.time_since_epoch();
      const auto seconds =
          std::chrono::duration_cast<std::chrono::seconds>(time);
      const timespec until = {
          static_cast<time_t>(seconds.count()),
          static_cast<long>(  // NOLINT(runtime/int)
              std::chrono::nanoseconds(time - seconds).count())};
      pthread_cond_timedwait(&earlier_, mu_.native_handle(), &until);
      continue;
    }
    const std::function<void()> ring =
        std::move(set_.extract(set_.begin()).mapped());
    times_.erase(first.second);
    lock.unlock();
    ring();
    lock.lock();
  }
}

}  // namespace wrapopt
