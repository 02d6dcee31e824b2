// The rounds of model averaging without TensorFlow, and their deadlines.
#include "cc/engine/rounds.h"

#include <gtest/gtest.h>

#include <atomic>
#include <condition_variable>  // NOLINT(build/c++11)
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>  // NOLINT(build/c++11)
#include <string>
#include <thread>  // NOLINT(build/c++11)
#include <utility>
#include <vector>

#include "cc/engine/deadline_timer.h"
#include "cc/engine/notification.h"
#include "tests/cc/arrays.h"
#include "tests/cc/pool.h"

namespace wrapopt {
namespace {

using IntRounds = Rounds<int>;
using Code = RoundsStatus::Code;

// Rings when the test says so.
class FakeTimer : public Timer {
 public:
  Id Set(double seconds, std::function<void()> ring) override {
    set[next] = {seconds, std::move(ring)};
    return next++;
  }
  void Cancel(Id id) override { set.erase(id); }

  void RingFirst() {
    const auto ring = set.begin()->second.second;
    set.erase(set.begin());
    ring();
  }

  std::map<Id, std::pair<double, std::function<void()>>> set;
  Id next = 0;
};

// The answers of a wait.
struct Heard {
  int times = 0;
  IntRounds::Answer answer;

  std::string workers() const {
    std::string names;
    for (const std::string& worker : answer.workers) names += worker + " ";
    return names;
  }
};

struct Fixture {
  bool Push(const std::string& worker, int64_t round, int value) {
    bool accepted;
    const RoundsStatus status =
        rounds->Push(worker, round, {value}, &accepted);
    EXPECT_EQ(status.message, "");
    return accepted;
  }

  int64_t Next(int64_t round, bool reset = false) {
    int64_t open = -7;
    EXPECT_EQ(rounds->Next(round, reset, &open).message, "");
    return open;
  }

  std::shared_ptr<Heard> Gather(int64_t round, int64_t min_workers) {
    return Start(round, min_workers, "");
  }
  std::shared_ptr<Heard> WaitFor(int64_t round,
                                 const std::string& worker = "") {
    return Start(round, 0, worker);
  }

  std::shared_ptr<Heard> Start(int64_t round, int64_t min_workers,
                               const std::string& worker) {
    const auto heard = std::make_shared<Heard>();
    IntRounds::Wait wait;
    wait.round = round;
    wait.min_workers = min_workers;
    wait.timeout_secs = 9;
    wait.worker = worker;
    if (watch) {
      wait.watch = watch;
      wait.unwatch = [this] { ++unwatched; };
    }
    wait.done = [heard](const IntRounds::Answer& answer) {
      ++heard->times;
      heard->answer = answer;
    };
    rounds->Start(std::move(wait));
    return heard;
  }

  FakeTimer timer;
  std::vector<std::string> warnings;
  std::function<bool(std::function<void()>)> watch;
  int unwatched = 0;
  std::shared_ptr<IntRounds> rounds = std::make_shared<IntRounds>(
      "r", 2, &timer,
      [this](const std::string& warning) { warnings.push_back(warning); });
};

TEST(Rounds, ARoundOfAll) {
  Fixture f;
  EXPECT_EQ(f.Next(0, /*reset=*/true), 0);
  const auto chief = f.Gather(0, 2);
  const auto worker = f.WaitFor(0);
  EXPECT_EQ(f.timer.set.size(), 2u);
  EXPECT_EQ(f.timer.set[0].first, 9.0);
  EXPECT_EQ(f.Push("b", 0, 3), true);
  EXPECT_EQ(chief->times, 0);
  EXPECT_EQ(f.Push("a", 0, 5), true);
  EXPECT_EQ(chief->times, 1);
  EXPECT_EQ(chief->workers(), "a b ");
  std::vector<int> values;
  EXPECT_EQ(f.rounds->Values(0, {"b", "a"}, 0, &values).message, "");
  EXPECT_EQ(values[0], 3);
  EXPECT_EQ(values[1], 5);
  EXPECT_EQ(worker->times, 0);
  EXPECT_EQ(f.Next(0), 1);
  EXPECT_EQ(worker->times, 1);
  EXPECT_EQ(worker->answer.open, 1);
  // Answered waits leave no deadline behind.
  EXPECT_EQ(f.timer.set.size(), 0u);
  EXPECT_EQ(f.Push("a", 0, 1), false);
  EXPECT_EQ(f.warnings.size(), 0u);
}

TEST(Rounds, AQuorumAfterTheDeadline) {
  Fixture f;
  f.Next(0, /*reset=*/true);
  f.Push("a", 0, 1);
  const auto first = f.Gather(0, 1);
  EXPECT_EQ(first->times, 0);
  f.timer.RingFirst();
  EXPECT_EQ(first->workers(), "a ");
  EXPECT_EQ(f.warnings.size(), 1u);
  EXPECT_EQ(f.warnings[0],
            "Round 0 of averaging rounds 'r' is made of 1 of 2 workers: 'a'.");
  // The dead worker is not expected again, so this round has no need to wait.
  f.Next(0);
  f.Push("a", 1, 1);
  EXPECT_EQ(f.Gather(1, 1)->times, 1);
  // It is back: now it is.
  f.Next(1);
  EXPECT_EQ(f.WaitFor(2, "b")->times, 0);
  f.Push("a", 2, 1);
  const auto third = f.Gather(2, 1);
  EXPECT_EQ(third->times, 0);
  f.Push("b", 2, 1);
  EXPECT_EQ(third->workers(), "a b ");
}

TEST(Rounds, TooFewAtTheDeadline) {
  Fixture f;
  f.Next(0, /*reset=*/true);
  f.Push("a", 0, 1);
  const auto chief = f.Gather(0, 2);
  f.timer.RingFirst();
  EXPECT_EQ(chief->times, 1);
  EXPECT_EQ(chief->answer.status.code == Code::kDeadlineExceeded, true);
  EXPECT_EQ(chief->answer.status.message,
            "round 0 of averaging rounds 'r' got values of 1 workers within 9 "
            "seconds ('a'), but needs 2 of 2: restart the others, wait longer, "
            "or reduce min_workers");
}

TEST(Rounds, AStepThatEnds) {
  Fixture f;
  std::function<void()> end;
  f.watch = [&end](std::function<void()> ended) {
    end = std::move(ended);
    return true;
  };
  const auto worker = f.WaitFor(-1);
  EXPECT_EQ(worker->times, 0);
  end();
  EXPECT_EQ(worker->times, 1);
  EXPECT_EQ(worker->answer.status.code == Code::kCancelled, true);
  EXPECT_EQ(f.timer.set.size(), 0u);
  // The one that watches has called; it is not called in turn.
  EXPECT_EQ(f.unwatched, 0);
  end();
  EXPECT_EQ(worker->times, 1);

  const auto other = f.WaitFor(-1);
  f.Next(0, /*reset=*/true);
  EXPECT_EQ(other->times, 1);
  EXPECT_EQ(f.unwatched, 1);

  f.watch = [](std::function<void()>) { return false; };
  const auto late = f.WaitFor(0);
  EXPECT_EQ(late->times, 1);
  EXPECT_EQ(late->answer.status.code == Code::kCancelled, true);
  EXPECT_EQ(f.timer.set.size(), 0u);
}

TEST(Rounds, TheEndOfTheRounds) {
  Fixture f;
  const auto worker = f.WaitFor(-1);
  f.rounds->End();
  EXPECT_EQ(worker->answer.status.code == Code::kAborted, true);
  EXPECT_EQ(f.WaitFor(-1)->answer.status.code == Code::kAborted, true);
  // A deadline that rings after the rounds are gone finds nothing.
  Fixture g;
  const auto waits = g.WaitFor(-1);
  g.rounds.reset();
  g.timer.RingFirst();
  EXPECT_EQ(waits->times, 0);
}

TEST(Rounds, WhatIsRefused) {
  Fixture f;
  int64_t open;
  f.Next(0, /*reset=*/true);
  f.Next(0);
  EXPECT_EQ(f.rounds->Next(0, false, &open).code == Code::kFailedPrecondition,
            true);
  EXPECT_EQ(f.Gather(0, 1)->answer.status.code == Code::kFailedPrecondition,
            true);
  f.Push("a", 1, 1);
  std::vector<int> values;
  EXPECT_EQ(f.rounds->Values(1, {"b"}, 0, &values).code ==
                Code::kFailedPrecondition,
            true);
  EXPECT_EQ(f.rounds->Values(1, {"a"}, 1, &values).message,
            "value must be less than 1, the number of values that worker 'a' "
            "pushed to averaging rounds 'r', got 1");
  f.Push("b", 1, 1);
  bool accepted;
  EXPECT_EQ(f.rounds->Push("c", 1, {1}, &accepted).code ==
                Code::kInvalidArgument,
            true);
}

// A callback runs without a lock.
TEST(Rounds, AreCalledByTheirCallbacks) {
  Fixture f;
  f.Next(0, /*reset=*/true);
  std::string heard;
  IntRounds::Wait wait;
  wait.round = 0;
  wait.timeout_secs = 9;
  wait.done = [&](const IntRounds::Answer& answer) {
    EXPECT_EQ(f.Push("a", answer.open, 5), true);
    heard = f.Gather(answer.open, 2)->workers() + "after";
  };
  f.rounds->Start(std::move(wait));
  f.Next(0);
  EXPECT_EQ(heard, "after");
}

// By the real clock: one that is set later and comes earlier ends the wait of
// the timer's thread.
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

// A wait of a thread, for its answer.
IntRounds::Answer Wait(IntRounds* rounds, int64_t round, int64_t min_workers,
                       double timeout_secs) {
  Notification answered;
  IntRounds::Answer result;
  IntRounds::Wait wait;
  wait.round = round;
  wait.min_workers = min_workers;
  wait.timeout_secs = timeout_secs;
  wait.done = [&](const IntRounds::Answer& answer) {
    result = answer;
    answered.Notify();
  };
  rounds->Start(std::move(wait));
  answered.Wait();
  return result;
}

// A chief and workers. Each round's mean is of what all have pushed.
TEST(Rounds, InThreads) {
  constexpr int kWorkers = 3, kRounds = 200;
  const auto rounds = std::make_shared<IntRounds>(
      "r", kWorkers, &DeadlineTimer::Get(),
      [](const std::string& warning) { ADD_FAILURE() << warning; });
  InThreads(kWorkers + 1, [&](int t) {
    int64_t open = -1;
    if (t == kWorkers) {
      EXPECT_TRUE(rounds->Next(-1, /*reset=*/true, &open).ok());
      for (int64_t round = 0; round < kRounds; ++round) {
        const IntRounds::Answer answer =
            Wait(rounds.get(), round, kWorkers, 100);
        ASSERT_EQ(answer.workers.size(), size_t{kWorkers})
            << answer.status.message;
        std::vector<int> values;
        ASSERT_TRUE(rounds->Values(round, answer.workers, 0, &values).ok());
        for (int worker = 0; worker < kWorkers; ++worker) {
          EXPECT_EQ(values[worker], 1000 * round + worker);
        }
        ASSERT_TRUE(rounds->Next(round, false, &open).ok());
      }
      return;
    }
    open = Wait(rounds.get(), -1, 0, 100).open;
    while (open < kRounds) {
      bool accepted;
      ASSERT_TRUE(rounds
                      ->Push(std::to_string(t), open,
                             {static_cast<int>(1000 * open + t)}, &accepted)
                      .ok());
      EXPECT_TRUE(accepted);
      open = Wait(rounds.get(), open, 0, 100).open;
    }
    EXPECT_EQ(open, kRounds);
  });
}

// Deadlines, ends of steps, pushes and the end of the rounds race. Each wait is
// answered once.
TEST(Rounds, EndsThatRace) {
  constexpr int kTimes = 60, kThreads = 4, kWaits = 6;
  for (int i = 0; i < kTimes; ++i) {
    auto rounds = std::make_shared<IntRounds>(
        "r", 2, &DeadlineTimer::Get(), [](const std::string&) {});
    int64_t open;
    rounds->Next(0, /*reset=*/true, &open);
    std::atomic<int> answers{0};
    Notification all;
    InThreads(kThreads, [&](int t) {
      Random random(kThreads * i + t);
      std::vector<std::function<void()>> ends;
      for (int w = 0; w < kWaits; ++w) {
        IntRounds::Wait wait;
        wait.round = 0;
        wait.min_workers = Below(3, &random);
        wait.timeout_secs = 1e-5 * Below(30, &random);
        wait.worker = wait.min_workers == 0 ? std::to_string(t % 2) : "";
        if (Below(2, &random) == 0) {
          wait.watch = [&ends](std::function<void()> end) {
            ends.push_back(std::move(end));
            return true;
          };
          wait.unwatch = [] {};
        }
        wait.done = [&](const IntRounds::Answer&) {
          if (++answers == kThreads * kWaits) all.Notify();
        };
        rounds->Start(std::move(wait));
        bool accepted;
        if (w == t) rounds->Push(std::to_string(t % 2), 0, {w}, &accepted);
        if (w == 3 && t == 1) rounds->Next(0, false, &open);
        if (w == 4 && t == 2) rounds->End();
        if (!ends.empty()) ends[Below(ends.size(), &random)]();
      }
    });
    all.Wait();
    EXPECT_EQ(answers, kThreads * kWaits);
  }
}

}  // namespace
}  // namespace wrapopt
