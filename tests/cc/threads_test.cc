// How threads share the work of the engine.
#include "cc/engine/threads.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <string>
#include <thread>  // NOLINT(build/c++11)
#include <utility>
#include <vector>

#include "cc/engine/elementwise.h"
#include "tests/cc/arrays.h"
#include "tests/cc/pool.h"
#include "tests/cc/reference.h"

namespace wrapopt {
namespace {

// Costs of a unit: much less than a range, and more than one.
constexpr int64_t kCosts[] = {0, 1, 300, 70000, 300000};

// Units without a lock: no thread may take another's, and this thread sees all.
void TakeEachOnce(const Threads& threads, int64_t units, int64_t cost) {
  std::vector<int> taken(units);
  RunParallel(threads, units, cost, [&taken](int64_t begin, int64_t end) {
    for (int64_t unit = begin; unit < end; ++unit) ++taken[unit];
    std::this_thread::yield();  // Let others take some.
  });
  for (int64_t unit = 0; unit < units; ++unit) {
    ASSERT_EQ(taken[unit], 1) << unit << " of " << units;
  }
}

TEST(RunParallel, TakesEachUnitOnce) {
  for (const int count : {0, 1, 2, 4}) {
    const Pool pool(count);
    for (const int64_t cost : kCosts) {
      for (const int64_t units : {0, 1, 2, 3, 5, 64, 667, 1000, 2001}) {
        TakeEachOnce(pool, units, cost);
      }
    }
  }
}

// Ranges that wait for each other: all four threads take one.
TEST(RunParallel, UsesItsThreads) {
  const Pool pool(4);
  std::atomic<int> begun{0};
  RunParallel(pool, 4, 300000, [&begun](int64_t, int64_t) {
    for (++begun; begun < 4;) std::this_thread::yield();
  });
  EXPECT_EQ(begun, 4);
}

TEST(RunParallel, TakesTurnsInOnePool) {
  const Pool pool(2);
  InThreads(3, [&pool](int) {
    for (int i = 0; i < 100; ++i) TakeEachOnce(pool, 40 + i, 70000);
  });
}

TEST(RunParallel, RunsInThreadsOfThePool) {
  const Pool pool(2);
  RunParallel(pool, 6, 300000, [&pool](int64_t begin, int64_t end) {
    for (; begin < end; ++begin) TakeEachOnce(pool, 50, 70000);
  });
}

// Its tasks begin when the work is over.
class LateThreads final : public Threads {
 public:
  int64_t count() const override { return 4; }
  void Schedule(std::function<void()> task) const override {
    tasks.push_back(std::move(task));
  }
  mutable std::vector<std::function<void()>> tasks;
};

TEST(RunParallel, DoesNotWaitForTasksThatHaveNotBegun) {
  LateThreads threads;
  TakeEachOnce(threads, 100, 70000);
  EXPECT_EQ(threads.tasks.size(), 3u);
  for (const auto& task : threads.tasks) task();
}

TEST(Notification, IsSeenByTheOneThatWaits) {
  for (int i = 0; i < 300; ++i) {
    Notification happened;
    int result = 0;
    InThreads(2, [&](int t) {
      if (t == 0) {
        result = 7;
        happened.Notify();
      } else {
        happened.Wait();
        EXPECT_EQ(result, 7);
      }
    });
  }
}

// Variables of a pass that takes a step of Momentum and updates two averages of
// each.
struct Model {
  Model(Number number, Number average, Random* random)
      : number(number), average(average) {
    // Of one block, of several, and the ends of blocks; together, so much that
    // threads share it.
    for (const size_t size : {0, 1, 7, 511, 512, 513, 2000, 0, 200001, 5}) {
      sizes.push_back(size);
      for (int a = 0; a < 3; ++a) {
        arrays.push_back(Numbers(size, number, random, a));
      }
      for (int a = 0; a < 2; ++a) {
        arrays.push_back(Numbers(size, average, random, 5));
      }
    }
  }

  void Add(Isa isa, Pass* pass) const {
    const size_t bytes = SizeOf(number);
    pass->AddStage({FindStep(RuleId::kMomentum, number, number, isa), scalars,
                    3, 5 * bytes, /*new_inputs=*/true});
    for (int a = 0; a < 2; ++a) {
      pass->AddStage({FindStep(RuleId::kEma, average, number, isa), &rates[a],
                      2, 2 * SizeOf(average), /*new_inputs=*/false});
    }
    for (size_t v = 0; v < sizes.size(); ++v) {
      void* const var = arrays[5 * v].data();
      pass->AddVariable(
          sizes[v], {var, arrays[5 * v + 1].data(), arrays[5 * v + 2].data(),
                     arrays[5 * v + 3].data(), var, arrays[5 * v + 4].data(),
                     var});
    }
  }

  void RunReference() const {
    for (size_t v = 0; v < sizes.size(); ++v) {
      void* const step[] = {arrays[5 * v].data(), arrays[5 * v + 1].data(),
                            arrays[5 * v + 2].data()};
      Reference(RuleId::kMomentum, number, number, step, scalars, sizes[v]);
      for (int a = 0; a < 2; ++a) {
        void* const ema[] = {arrays[5 * v + 3 + a].data(), step[0]};
        Reference(RuleId::kEma, average, number, ema, &rates[a], sizes[v]);
      }
    }
  }

  void ExpectSameAs(const Model& want) const {
    for (size_t a = 0; a < arrays.size(); ++a) {
      ExpectSame(arrays[a], want.arrays[a], a % 5 < 3 ? number : average,
                 "array " + std::to_string(a));
    }
  }

  const Number number, average;
  const double scalars[3] = {0.1, 0.9, 1};
  const double rates[2] = {0.25, 0.001};
  std::vector<size_t> sizes;
  std::vector<Array> arrays;
};

TEST(Pass, GivesTheSameBitsWithAnyThreads) {
  Random random(5);
  for (const auto& [average, number] : kPairs) {
    const Model model(number, average, &random);
    const Model want = model;
    want.RunReference();
    for (const int threads : {0, 1, 3}) {
      const Model got = model;
      Pass pass;
      got.Add(SupportedIsas().back(), &pass);
      RunPass(Pool(threads), pass);
      got.ExpectSameAs(want);
    }
  }
}

TEST(Pass, RunsItsBlocksInAnyOrder) {
  Random random(6);
  const Model got(Number::kFloat, Number::kFloat, &random);
  const Model want = got;
  want.RunReference();
  Pass pass;
  got.Add(SupportedIsas().back(), &pass);
  for (size_t block = pass.blocks(); block-- > 0;) {
    pass.Run(block, block);
    pass.Run(block, block + 1);
  }
  got.ExpectSameAs(want);
}

// A small one is done before a thread has woken up.
TEST(Pass, IsSharedIfItIsLarge) {
  constexpr std::pair<size_t, size_t> kSizesAndTasks[] = {{1 << 14, 0},
                                                          {1 << 20, 3}};
  for (const auto& [size, tasks] : kSizesAndTasks) {
    const LateThreads threads;
    std::vector<float> shadow(size), value(size);
    const double rate = 0.5;
    Pass pass;
    pass.AddStage({FindStep(RuleId::kEma, Number::kFloat, Number::kFloat,
                            Isa::kBaseline),
                   &rate, 2, 12, true});
    pass.AddVariable(size, {shadow.data(), value.data()});
    RunPass(threads, pass);
    EXPECT_EQ(threads.tasks.size(), tasks) << size;
  }
}

TEST(Pass, OfNothing) {
  const Pool pool(2);
  Pass pass;
  RunPass(pool, pass);
  const double rate = 0.5;
  pass.AddStage({FindStep(RuleId::kEma, Number::kFloat, Number::kFloat,
                          Isa::kBaseline),
                 &rate, 2, 12, true});
  RunPass(pool, pass);
  pass.AddVariable(0, {nullptr, nullptr});
  RunPass(pool, pass);
  EXPECT_EQ(pass.blocks(), 0u);
}

// Averages of rate 0 have no memory here: a pass that read or wrote them would
// crash. The other average still moves.
TEST(Pass, LeavesAveragesOfRateZeroAlone) {
  Random random(8);
  const Number number = Number::kFloat;
  const Isa isa = SupportedIsas().back();
  const double scalars[] = {0.1, 0.9, 1}, rates[] = {0, 0.25, 0};
  const RuleStep move = FindStep(RuleId::kEma, number, number, isa);
  for (const int threads : {0, 3}) {
    for (const bool with_step : {true, false}) {
      Pass pass, idle;
      if (with_step) {
        pass.AddStage({FindStep(RuleId::kMomentum, number, number, isa),
                       scalars, 3, 20, /*new_inputs=*/true});
      }
      for (const double& rate : rates) {
        pass.AddStage({move, &rate, 2, 8, /*new_inputs=*/false});
        if (rate == 0) idle.AddStage({move, &rate, 2, 8, false});
      }
      const size_t size = 200001;
      std::vector<Array> got;
      for (int a = 0; a < 4; ++a) {
        got.push_back(Numbers(size, number, &random, a));
      }
      const std::vector<Array> want = got;
      void* const var = got[0].data();
      std::vector<void*> operands = {var, got[1].data(), got[2].data()};
      if (!with_step) operands.clear();
      for (void* const shadow : {static_cast<void*>(nullptr), got[3].data(),
                                 static_cast<void*>(nullptr)}) {
        operands.push_back(shadow);
        operands.push_back(var);
      }
      pass.AddVariable(size, operands);
      RunPass(Pool(threads), pass);
      void* const step[] = {want[0].data(), want[1].data(), want[2].data()};
      if (with_step) {
        Reference(RuleId::kMomentum, number, number, step, scalars, size);
      }
      void* const ema[] = {want[3].data(), step[0]};
      Reference(RuleId::kEma, number, number, ema, &rates[1], size);
      for (int a = 0; a < 4; ++a) {
        ExpectSame(got[a], want[a], number, "array " + std::to_string(a));
      }
      EXPECT_EQ(pass.bytes(), size * (with_step ? 28.0 : 8.0));
      EXPECT_FALSE(pass.is_idle());

      idle.AddVariable(size, {nullptr, nullptr, nullptr, nullptr});
      RunPass(Pool(threads), idle);
      EXPECT_EQ(idle.bytes(), 0);
      EXPECT_TRUE(idle.is_idle());
    }
  }
}

// A weighted sum of two sources in the scratch array, towards which a target
// moves; in double, the scratch array is full to its end.
TEST(Pass, KeepsASumInItsScratchArray) {
  Random random(7);
  for (const Number number : {Number::kFloat, Number::kDouble}) {
    for (const int threads : {0, 3}) {
      const double first[] = {0.25, 1}, second[] = {0.75, 0}, rate = 0.5;
      Pass pass(number);
      const Isa isa = SupportedIsas().back();
      const RuleStep sum =
          FindStep(RuleId::kWeightedSum, number, number, isa);
      const RuleStep move = FindStep(RuleId::kEma, number, number, isa);
      const size_t bytes = SizeOf(number);
      pass.AddStage({sum, first, 2, bytes, true, /*scratch=*/0});
      pass.AddStage({sum, second, 2, bytes, true, /*scratch=*/0});
      pass.AddStage({move, &rate, 2, 2 * bytes, false, /*scratch=*/1});
      std::vector<Array> arrays, want;
      const std::vector<size_t> sizes = {1, 513, 200000, 1024};
      for (const size_t size : sizes) {
        for (int a = 0; a < 3; ++a) {
          arrays.push_back(Numbers(size, number, &random, a));
        }
        const Array* const end = arrays.data() + arrays.size();
        const Array scratch(size * bytes);
        want.push_back(end[-1]);
        void* const a[] = {scratch.data(), end[-3].data()};
        void* const b[] = {scratch.data(), end[-2].data()};
        void* const c[] = {want.back().data(), scratch.data()};
        Reference(RuleId::kWeightedSum, number, number, a, first, size);
        Reference(RuleId::kWeightedSum, number, number, b, second, size);
        Reference(RuleId::kEma, number, number, c, &rate, size);
      }
      // Not before: a vector that grows copies its arrays.
      for (size_t v = 0; v < sizes.size(); ++v) {
        pass.AddVariable(sizes[v], {nullptr, arrays[3 * v].data(), nullptr,
                                    arrays[3 * v + 1].data(),
                                    arrays[3 * v + 2].data(), nullptr});
      }
      RunPass(Pool(threads), pass);
      for (size_t v = 0; v < sizes.size(); ++v) {
        ExpectSame(arrays[3 * v + 2], want[v], number, "target");
      }
    }
  }
}

}  // namespace
}  // namespace wrapopt
