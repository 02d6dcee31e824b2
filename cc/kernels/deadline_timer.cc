#include "cc/kernels/deadline_timer.h"

#include <thread>  // NOLINT(build/c++11)

namespace wrapopt {

DeadlineTimer& DeadlineTimer::Get() {
  static DeadlineTimer* const timer = new DeadlineTimer;
  return *timer;
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
    earlier_.notify_one();
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
      // `wait` without a time would tie the wheel to GLIBCXX_3.4.30.
      earlier_.wait_for(lock, std::chrono::hours(1));
      continue;
    }
    const Deadline first = set_.begin()->first;
    if (Clock::now() < first.first) {
      earlier_.wait_until(lock, first.first);
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
