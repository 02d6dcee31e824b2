// The timer of waits, by the real clock.
#include "cc/protocols/deadline_timer.h"

#include <gtest/gtest.h>

#include <atomic>
#include <condition_variable>  // NOLINT(build/c++11)
#include <mutex>               // NOLINT(build/c++11)
#include <string>
#include <vector>

#include "cc/engine/notification.h"
#include "tests/cc/arrays.h"
#include "tests/cc/pool.h"

namespace wrapopt {
namespace {

// The timer's thread wakes up for a deadline that is set later and is earlier.
TEST(DeadlineTimer, TheEarliestDeadline) {
  std::mutex mu;
  std::condition_variable rung;
  std::string order;
  const auto ring = [&](char name) {
    return [&, name] {
      std::lock_guard<std::mutex> lock(mu);
      order += name;
      rung.notify_all();
    };
  };
  DeadlineTimer& timer = DeadlineTimer::Get();
  const Timer::Id far = timer.Set(1000, ring('f'));
  const Timer::Id cancelled = timer.Set(500, ring('x'));
  timer.Cancel(cancelled);
  timer.Cancel(cancelled);
  timer.Set(0.05, ring('a'));
  std::unique_lock<std::mutex> lock(mu);
  while (order.find('a') == std::string::npos) rung.wait(lock);
  EXPECT_EQ(order, "a");
  lock.unlock();
  timer.Cancel(far);
}

TEST(DeadlineTimer, ACancelledDeadlineDoesNotRing) {
  Notification held, go, last;
  bool rang = false;
  DeadlineTimer& timer = DeadlineTimer::Get();
  timer.Set(0, [&] {
    held.Notify();
    go.Wait();
  });
  held.Wait();
  timer.Cancel(timer.Set(0, [&] { rang = true; }));
  timer.Set(0, [&] { last.Notify(); });
  go.Notify();
  last.Wait();
  EXPECT_FALSE(rang);
}

// Threads set deadlines and cancel some. Each rings once, or was cancelled.
TEST(DeadlineTimer, InThreads) {
  constexpr int kDeadlines = 200;
  DeadlineTimer& timer = DeadlineTimer::Get();
  InThreads(3, [&](int t) {
    Random random(t);
    std::vector<std::atomic<int>> rung(kDeadlines);
    std::vector<bool> cancelled(kDeadlines);
    Notification last;
    for (int i = 0; i < kDeadlines; ++i) {
      const bool cancel = Below(2, &random) == 0;
      const Timer::Id id =
          timer.Set(cancel ? 1000 : 1e-5 * Below(100, &random),
                    [&rung, i] { ++rung[i]; });
      if (cancel) timer.Cancel(id);
      cancelled[i] = cancel;
    }
    timer.Set(0.01, [&last] { last.Notify(); });
    last.Wait();
    for (int i = 0; i < kDeadlines; ++i) {
      EXPECT_EQ(rung[i], cancelled[i] ? 0 : 1);
    }
  });
}

}  // namespace
}  // namespace wrapopt
