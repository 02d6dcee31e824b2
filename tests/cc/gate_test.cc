// The staleness gate without TensorFlow.
#include "cc/protocols/gate.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>  // NOLINT(build/c++11)
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

// Whether the gate admits an update, whose ticket is new.
bool Admit(const std::shared_ptr<Gate>& gate, int64_t step, int64_t recorded,
           int64_t limit, int64_t* staleness, Ticket* ticket) {
  return ticket->Begin(gate, /*token=*/-1) &&
         ticket->Admit(step, recorded, limit, staleness);
}

// The number of an update that the gate must admit.
int64_t Number(const std::shared_ptr<Gate>& gate, int64_t step,
               Ticket* ticket) {
  int64_t staleness;
  EXPECT_TRUE(Admit(gate, step, 0, kMost, &staleness, ticket));
  return ticket->number();
}

// Two workers with a limit of 1, of which the slower one records first.
TEST(Gate, ATrajectory) {
  const auto gate = std::make_shared<Gate>();
  int64_t step = 10, in_flight, staleness;
  Ticket last;
  bool counts;
  const int64_t slow = gate->Record(step, &in_flight);
  EXPECT_EQ(slow, 10);
  EXPECT_EQ(in_flight, 0);
  {
    Ticket first, second, third;
    EXPECT_TRUE(Admit(gate, step, slow, 1, &staleness, &first));
    EXPECT_EQ(staleness, 0);
    EXPECT_EQ(first.number(), 10);
    // The weights may miss the first, which is in flight.
    EXPECT_TRUE(Admit(gate, step, slow, 1, &staleness, &second));
    EXPECT_EQ(staleness, 1);
    EXPECT_EQ(second.number(), 11);
    EXPECT_FALSE(Admit(gate, step, slow, 1, &staleness, &third));
    EXPECT_EQ(staleness, 2);
    EXPECT_EQ(third.number(), -1);
    EXPECT_EQ(third.gate(), nullptr);
    EXPECT_FALSE(third.Complete(&counts));
    EXPECT_TRUE(first.Complete(&counts));
    ++step;
    EXPECT_FALSE(first.Complete(&counts));
    EXPECT_EQ(gate->Record(step, &in_flight), 11);
    EXPECT_EQ(in_flight, 1);
  }
  // The second was aborted: it counts, but the step does not have it.
  EXPECT_EQ(gate->Record(step, &in_flight), 12);
  EXPECT_EQ(in_flight, 0);
  EXPECT_TRUE(Admit(gate, step, 12, 0, &staleness, &last));
  EXPECT_EQ(staleness, 0);
  // Its number is free again.
  EXPECT_EQ(last.number(), 11);
}

TEST(Gate, TheNumberOfALostUpdateAndNotThatOfOneInFlight) {
  const auto gate = std::make_shared<Gate>();
  Ticket kept, next, last;
  {
    Ticket lost;
    EXPECT_EQ(Number(gate, 0, &lost), 0);
    EXPECT_EQ(Number(gate, 0, &kept), 1);
  }
  EXPECT_EQ(Number(gate, 0, &next), 0);
  EXPECT_EQ(Number(gate, 0, &last), 2);
}

TEST(Gate, NumbersAfterTheStepWasSet) {
  const auto gate = std::make_shared<Gate>();
  Ticket kept, later;
  {
    Ticket lost;
    EXPECT_EQ(Number(gate, 7, &kept), 7);
    EXPECT_EQ(Number(gate, 7, &lost), 8);
    // A restore, while two are in flight: they will count from there.
    EXPECT_EQ(Number(gate, 100, &later), 102);
  }
  // The number of the lost one is of before.
  Ticket last;
  EXPECT_EQ(Number(gate, 100, &last), 102);
}

TEST(Gate, TakesBackNoCountsOfBeforeTheStepWasSet) {
  const auto gate = std::make_shared<Gate>();
  const auto abort = [&](int64_t step, int64_t bucket) {
    Ticket ticket;
    Number(gate, step, &ticket);
    ticket.set_bucket(bucket);
  };
  abort(7, 3);
  abort(7, 4);
  EXPECT_EQ(gate->TakeAbortedBuckets(), (std::vector<int64_t>{3, 4}));
  EXPECT_TRUE(gate->TakeAbortedBuckets().empty());
  abort(7, 5);
  abort(20, 6);  // A restore, of the counts as well.
  EXPECT_EQ(gate->TakeAbortedBuckets(), std::vector<int64_t>{6});
}

TEST(Gate, ANegativeLimitAdmitsNothing) {
  Ticket ticket;
  int64_t staleness;
  EXPECT_FALSE(
      Admit(std::make_shared<Gate>(), 3, 5, -1, &staleness, &ticket));
  EXPECT_EQ(staleness, -2);
  EXPECT_EQ(ticket.number(), -1);
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
        Admit(gate, step, recorded, kMost, &staleness, &ticket);
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
    std::vector<int64_t> places;  // Of the updates that were admitted.
    std::vector<int64_t> numbers;  // Of those that were completed.
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
        if (!Admit(gate, step, recorded, kLimit, &staleness, &ticket)) {
          EXPECT_GT(staleness, kLimit);
          ++count.refused;
          continue;
        }
      }
      EXPECT_GE(staleness, 0);
      EXPECT_LE(staleness, kLimit);
      // So many updates were admitted before this one.
      count.places.push_back(recorded + staleness);
      // Others are admitted meanwhile.
      for (int64_t wait = Below(3, &random); wait > 0; --wait) {
        std::this_thread::yield();
      }
      if (Below(8, &random) == 0) {
        ++count.aborted;
        continue;
      }
      const std::lock_guard<std::shared_mutex> lock(mu);
      bool counted;
      EXPECT_TRUE(ticket.Complete(&counted));
      EXPECT_TRUE(counted);
      ++step;
      ++count.completed;
      count.numbers.push_back(ticket.number());
    }
  });
  Counts all;
  for (const Counts& count : counts) {
    all.refused += count.refused;
    all.completed += count.completed;
    all.aborted += count.aborted;
    all.places.insert(all.places.end(), count.places.begin(),
                      count.places.end());
    all.numbers.insert(all.numbers.end(), count.numbers.begin(),
                       count.numbers.end());
  }
  const int64_t admitted = all.places.size();
  EXPECT_EQ(all.completed, step);
  EXPECT_EQ(admitted, all.completed + all.aborted);
  EXPECT_EQ(admitted + all.refused, kWorkers * kUpdates);
  // Each update was counted once: the places are 0, 1, 2, ...
  std::sort(all.places.begin(), all.places.end());
  for (int64_t i = 0; i < admitted; ++i) ASSERT_EQ(all.places[i], i);
  // No two complete updates have one number. The numbers that are left free are
  // those of the last aborted ones: the next updates get them.
  std::sort(all.numbers.begin(), all.numbers.end());
  EXPECT_GE(all.numbers.front(), 0);
  EXPECT_LT(all.numbers.back(), step + kWorkers);
  Ticket next[kWorkers];
  for (Ticket& ticket : next) {
    all.numbers.push_back(Number(gate, step, &ticket));
  }
  std::sort(all.numbers.begin(), all.numbers.end());
  for (int64_t i = 0; i < step + kWorkers; ++i) ASSERT_EQ(all.numbers[i], i);
  bool counted;
  for (Ticket& ticket : next) EXPECT_TRUE(ticket.Complete(&counted));
  int64_t in_flight;
  EXPECT_EQ(gate->Record(step, &in_flight), admitted);
  EXPECT_EQ(in_flight, 0);
}

// Both have incremented the step. The one that is aborted counts twice.
TEST(Gate, AnUpdateThatIsAbortedAtItsEnd) {
  const auto gate = std::make_shared<Gate>();
  Ticket other, next;
  int64_t staleness;
  {
    Ticket aborted;
    for (Ticket* ticket : {&other, &aborted}) {
      EXPECT_TRUE(ticket->Begin(gate, -1));
      EXPECT_TRUE(ticket->Admit(0, 0, 9, &staleness));
    }
  }
  EXPECT_TRUE(next.Begin(gate, -1));
  EXPECT_TRUE(next.Admit(2, 0, 9, &staleness));
  EXPECT_EQ(staleness, 3);
}

TEST(Gate, ATryWaitsAsLongAsItsPatience) {
  const auto gate = std::make_shared<Gate>();
  Ticket first;
  EXPECT_TRUE(first.Begin(gate, 5));
  for (const int milliseconds : {30, 1010}) {
    const std::chrono::milliseconds patience(milliseconds);
    const auto start = std::chrono::steady_clock::now();
    Ticket next;
    EXPECT_TRUE(next.Begin(gate, 5, patience));
    EXPECT_GE(std::chrono::steady_clock::now() - start, patience);
    EXPECT_TRUE(first.Begin(gate, 5, std::chrono::milliseconds(0)));
  }
}

// The worker of an update dies, and another one tries the update again.
TEST(Gate, AnUpdateThatIsTriedAgain) {
  const auto gate = std::make_shared<Gate>();
  int64_t staleness, in_flight;
  bool counts;
  const auto admit = [&](Ticket* ticket) {
    EXPECT_TRUE(ticket->Begin(gate, 0, std::chrono::milliseconds(1)));
    EXPECT_TRUE(ticket->Admit(0, 0, 9, &staleness));
    return ticket->number();
  };
  Ticket complete, refused, again;
  {  // It dies in the update.
    Ticket lost;
    EXPECT_EQ(admit(&lost), 0);
  }
  {  // It seems to be dead, and is in the update for long.
    Ticket slow, second;
    EXPECT_EQ(admit(&slow), 0);
    EXPECT_EQ(admit(&second), 1);
    EXPECT_TRUE(slow.Complete(&counts));
    EXPECT_FALSE(counts);
    EXPECT_TRUE(second.Complete(&counts));
    EXPECT_TRUE(counts);
  }
  // It dies when the update is complete.
  EXPECT_FALSE(complete.Begin(gate, 0));
  gate->Record(1, &in_flight);
  EXPECT_EQ(in_flight, 0);
  // The update is refused.
  EXPECT_TRUE(refused.Begin(gate, 6));
  EXPECT_FALSE(refused.Admit(1, 0, -1, &staleness));
  EXPECT_FALSE(again.Begin(gate, 6));
  {  // The first try does not get as far, and the next one does not wait.
    Ticket first;
    EXPECT_TRUE(first.Begin(gate, 8));
  }
  Ticket second, plain, other;
  EXPECT_TRUE(second.Begin(gate, 8, std::chrono::hours(1)));
  // Updates without a token have nothing in common.
  EXPECT_TRUE(plain.Begin(gate, -1));
  EXPECT_TRUE(other.Begin(gate, -1, std::chrono::hours(1)));
}

TEST(Gate, ARetryWaitsForTheEndOfTheFirstTry) {
  const auto gate = std::make_shared<Gate>();
  Ticket ticket;
  int64_t staleness;
  ASSERT_TRUE(ticket.Begin(gate, 7));
  ASSERT_TRUE(ticket.Admit(0, 0, 0, &staleness));
  InThreads(2, [&](int t) {
    bool counts;
    if (t == 0) {
      EXPECT_FALSE(Ticket().Begin(gate, 7, std::chrono::minutes(1)));
    } else {
      EXPECT_TRUE(ticket.Complete(&counts));
      EXPECT_TRUE(counts);
    }
  });
}

// Two tries that come at the same time: one is admitted, and the other waits.
TEST(Gate, TriesThatRace) {
  for (int64_t token = 0; token < 2000; ++token) {
    const auto gate = std::make_shared<Gate>();
    std::atomic<int> complete{0};
    InThreads(2, [&](int) {
      Ticket ticket;
      if (!ticket.Begin(gate, token)) return;
      int64_t staleness;
      ASSERT_TRUE(ticket.Admit(complete, 0, kMost, &staleness));
      bool counts;
      ASSERT_TRUE(ticket.Complete(&counts));
      complete += counts;
    });
    ASSERT_EQ(complete, 1);
  }
}

TEST(Gate, ForgetsOldTokens) {
  const auto gate = std::make_shared<Gate>();
  int64_t staleness;
  for (int64_t token = 0; token < 70000; ++token) {
    Ticket ticket;
    ticket.Begin(gate, token);
    ticket.Admit(0, 0, -1, &staleness);
  }
  EXPECT_FALSE(Ticket().Begin(gate, 69999));
  EXPECT_TRUE(Ticket().Begin(gate, 0));
}

TEST(Ticket, IsCompletedOnce) {
  for (int i = 0; i < 300; ++i) {
    const auto gate = std::make_shared<Gate>();
    int64_t value;
    Ticket ticket;
    Number(gate, 0, &ticket);
    std::vector<int> completed(3);
    InThreads(3, [&](int t) {
      EXPECT_NE(ticket.gate(), nullptr);
      bool counts;
      completed[t] = ticket.Complete(&counts);
    });
    EXPECT_EQ(completed[0] + completed[1] + completed[2], 1);
    gate->Record(1, &value);
    EXPECT_EQ(value, 0);
  }
}

// The last ticket may live longer than the op's resource.
TEST(Ticket, KeepsItsGate) {
  auto gate = std::make_shared<Gate>();
  Ticket ticket;
  Number(gate, 0, &ticket);
  gate = nullptr;
}

}  // namespace
}  // namespace wrapopt
