// The staleness gate without TensorFlow.
#include "cc/engine/gate.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <shared_mutex>  // NOLINT(build/c++11)
#include <vector>

#include "tests/cc/arrays.h"
#include "tests/cc/pool.h"

namespace wrapopt {
namespace {

constexpr int64_t kLeast = std::numeric_limits<int64_t>::min();
constexpr int64_t kMost = std::numeric_limits<int64_t>::max();

// Two workers with a limit of 1, of which the slower one records first.
TEST(Gate, ATrajectory) {
  const auto gate = std::make_shared<Gate>();
  int64_t step = 10, in_flight, staleness;
  const int64_t slow = gate->Record(step, &in_flight);
  EXPECT_EQ(slow, 10);
  EXPECT_EQ(in_flight, 0);
  {
    Ticket first, second, third;
    EXPECT_TRUE(gate->Admit(step, slow, 1, &staleness));
    EXPECT_EQ(staleness, 0);
    first.Admit(gate);
    // The weights may miss the first, which is in flight.
    EXPECT_TRUE(gate->Admit(step, slow, 1, &staleness));
    EXPECT_EQ(staleness, 1);
    second.Admit(gate);
    EXPECT_FALSE(gate->Admit(step, slow, 1, &staleness));
    EXPECT_EQ(staleness, 2);
    EXPECT_EQ(third.gate(), nullptr);
    EXPECT_FALSE(third.Complete());
    EXPECT_TRUE(first.Complete());
    ++step;
    EXPECT_FALSE(first.Complete());
    EXPECT_EQ(gate->Record(step, &in_flight), 11);
    EXPECT_EQ(in_flight, 1);
  }
  // The second was aborted: it counts, but the step does not have it.
  EXPECT_EQ(gate->Record(step, &in_flight), 12);
  EXPECT_EQ(in_flight, 0);
  EXPECT_TRUE(gate->Admit(step, 12, 0, &staleness));
  EXPECT_EQ(staleness, 0);
}

TEST(Gate, ANegativeLimitAdmitsNothing) {
  Gate gate;
  int64_t staleness;
  EXPECT_FALSE(gate.Admit(3, 5, -1, &staleness));
  EXPECT_EQ(staleness, -2);
}

// An op may set the step to any number, and a worker may record any.
TEST(Gate, TheEndsOfInt64) {
  for (const int64_t step : {kLeast, kLeast + 1, int64_t{-1}, int64_t{0},
                             kMost - 1, kMost}) {
    for (const int64_t recorded : {kLeast, int64_t{-1}, int64_t{1}, kMost}) {
      const auto gate = std::make_shared<Gate>();
      for (int update = 0; update < 3; ++update) {
        int64_t staleness, in_flight;
        Ticket ticket;
        if (gate->Admit(step, recorded, kMost, &staleness)) {
          ticket.Admit(gate);
        }
        gate->Record(step, &in_flight);
        EXPECT_EQ(in_flight, 1);
      }
    }
  }
  EXPECT_EQ(SaturatedSum(kMost, 1), kMost);
  EXPECT_EQ(SaturatedSum(kLeast, -1), kLeast);
  EXPECT_EQ(SaturatedSum(kMost, kLeast), -1);
  EXPECT_EQ(SaturatedDifference(kLeast, 1), kLeast);
  EXPECT_EQ(SaturatedDifference(kMost, -1), kMost);
  EXPECT_EQ(SaturatedDifference(0, kLeast), kMost);
}

// Workers record, compute, and are admitted or not; some die in an update.
TEST(Gate, RacingWorkers) {
  constexpr int kWorkers = 4, kUpdates = 3000, kLimit = 2;
  const auto gate = std::make_shared<Gate>();
  std::shared_mutex mu;  // As the lock of the step variable.
  int64_t step = 0;
  struct Counts {
    int64_t refused = 0, completed = 0, aborted = 0;
    std::vector<int64_t> numbers;  // Of the updates that were admitted.
  };
  std::vector<Counts> counts(kWorkers);
  InThreads(kWorkers, [&](int worker) {
    Random random(worker);
    Counts& count = counts[worker];
    for (int i = 0; i < kUpdates; ++i) {
      int64_t recorded, in_flight, staleness;
      {
        const std::shared_lock<std::shared_mutex> lock(mu);
        recorded = gate->Record(step, &in_flight);
        EXPECT_GE(in_flight, 0);
        EXPECT_LT(in_flight, kWorkers);
      }
      for (int64_t wait = Below(3, &random); wait > 0; --wait) {
        std::this_thread::yield();
      }
      Ticket ticket;
      {
        const std::shared_lock<std::shared_mutex> lock(mu);
        if (!gate->Admit(step, recorded, kLimit, &staleness)) {
          EXPECT_GT(staleness, kLimit);
          ++count.refused;
          continue;
        }
      }
      ticket.Admit(gate);
      EXPECT_GE(staleness, 0);
      EXPECT_LE(staleness, kLimit);
      // So many updates were admitted before this one.
      count.numbers.push_back(recorded + staleness);
      if (Below(8, &random) == 0) {
        ++count.aborted;
        continue;
      }
      const std::lock_guard<std::shared_mutex> lock(mu);
      EXPECT_TRUE(ticket.Complete());
      ++step;
      ++count.completed;
    }
  });
  Counts all;
  for (const Counts& count : counts) {
    all.refused += count.refused;
    all.completed += count.completed;
    all.aborted += count.aborted;
    all.numbers.insert(all.numbers.end(), count.numbers.begin(),
                       count.numbers.end());
  }
  const int64_t admitted = all.numbers.size();
  EXPECT_EQ(all.completed, step);
  EXPECT_EQ(admitted, all.completed + all.aborted);
  EXPECT_EQ(admitted + all.refused, kWorkers * kUpdates);
  // Each update was counted once: the numbers are 0, 1, 2, ...
  std::sort(all.numbers.begin(), all.numbers.end());
  for (int64_t i = 0; i < admitted; ++i) ASSERT_EQ(all.numbers[i], i);
  int64_t in_flight;
  EXPECT_EQ(gate->Record(step, &in_flight), admitted);
  EXPECT_EQ(in_flight, 0);
}

TEST(Ticket, IsCompletedOnce) {
  for (int i = 0; i < 300; ++i) {
    const auto gate = std::make_shared<Gate>();
    int64_t value;
    ASSERT_TRUE(gate->Admit(0, 0, 0, &value));
    Ticket ticket;
    ticket.Admit(gate);
    std::vector<int> completed(3);
    InThreads(3, [&](int t) {
      EXPECT_NE(ticket.gate(), nullptr);
      completed[t] = ticket.Complete();
    });
    EXPECT_EQ(completed[0] + completed[1] + completed[2], 1);
    gate->Record(1, &value);
    EXPECT_EQ(value, 0);
  }
}

// The last ticket may live longer than the op's resource.
TEST(Ticket, KeepsItsGate) {
  auto gate = std::make_shared<Gate>();
  int64_t staleness;
  ASSERT_TRUE(gate->Admit(0, 0, 0, &staleness));
  Ticket ticket;
  ticket.Admit(std::move(gate));
}

}  // namespace
}  // namespace wrapopt
