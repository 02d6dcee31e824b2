// The lock of steps without TensorFlow.
#include "cc/protocols/step_lock.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <thread>  // NOLINT(build/c++11)
#include <vector>

#include "tests/cc/pool.h"

namespace wrapopt {
namespace {

TEST(StepLock, InOrder) {
  StepLock lock;
  std::vector<int> held;
  const int who[4] = {};
  int asked = 0;
  for (int i = 0; i < 4; ++i) {
    EXPECT_TRUE(lock.Acquire(
        who + i, [&asked] { return ++asked > 0; },
        [&held, i] { held.push_back(i); }));
  }
  EXPECT_EQ(asked, 3);  // The first one does not wait.
  EXPECT_EQ(held, std::vector<int>({0}));
  EXPECT_FALSE(lock.GiveUp(who));  // It holds the lock.
  EXPECT_TRUE(lock.GiveUp(who + 2));
  EXPECT_FALSE(lock.GiveUp(who + 2));
  EXPECT_EQ(held, std::vector<int>({0}));
  lock.Release();
  EXPECT_EQ(held, std::vector<int>({0, 1}));
  lock.Release();
  EXPECT_EQ(held, std::vector<int>({0, 1, 3}));
  // A caller that may not wait does not get the lock of another.
  EXPECT_FALSE(lock.Acquire(
      who, [] { return false; }, [&held] { held.push_back(9); }));
  lock.Release();
  EXPECT_TRUE(lock.Acquire(
      who, [] { return false; }, [&held] { held.push_back(4); }));
  EXPECT_EQ(held, std::vector<int>({0, 1, 3, 4}));
}

TEST(StepLock, OneAtATime) {
  constexpr int kThreads = 4, kSteps = 2000;
  StepLock lock;
  int64_t inside = 0;  // Not atomic: the lock orders the threads.
  std::atomic<int> given_up{0}, ended{0};
  const auto run = [&] {
    for (int i = 0; i < kSteps; ++i) {
      std::atomic<bool> granted{false};
      EXPECT_TRUE(lock.Acquire(
          &granted, [] { return true; }, [&granted] { granted = true; }));
      if (i % 3 == 0 && lock.GiveUp(&granted)) {
        ++given_up;
        continue;
      }
      while (!granted) std::this_thread::yield();
      ++inside;
      ++ended;
      lock.Release();
    }
  };
  {
    const Pool pool(kThreads);
    for (int i = 0; i < kThreads; ++i) pool.Schedule(run);
  }
  EXPECT_EQ(inside, ended);
  EXPECT_EQ(ended + given_up, kThreads * kSteps);
}

}  // namespace
}  // namespace wrapopt
