// A pass that compensates gradients for their age reads and writes each array
// once, and computes the bits of its rules one after the other.
#include "cc/engine/compensation.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <string>
#include <vector>

#include "cc/engine/elementwise.h"
#include "cc/engine/isa.h"
#include "cc/engine/number.h"
#include "cc/engine/threads.h"
#include "cc/rules/rules.h"
#include "tests/cc/arrays.h"
#include "tests/cc/pool.h"
#include "tests/cc/reference.h"

namespace wrapopt {
namespace {

// The arrays of a variable: var, accum, origin, grad, the policy's state.
std::vector<Array> Arrays(size_t size, Number states, Number grads,
                          Number compute, Random* random) {
  std::vector<Array> arrays;
  arrays.reserve(5);
  for (int a = 0; a < 3; ++a) {
    arrays.push_back(Numbers(size, states, random, a));
  }
  arrays.push_back(Numbers(size, grads, random, 3));
  arrays.push_back(Numbers(size, compute, random, 1));
  return arrays;
}

TEST(Compensation, IsPartOfThePassOfTheStep) {
  Random random(3);
  for (const PolicyInfo& policy : kPolicies) {
    for (const auto& [states, grads] : kPairs) {
      // Gradients are of the variables' type, or of float.
      if (grads != states && grads != Number::kFloat) continue;
      for (const size_t size : {1, 512, 513, 100000}) {
        const Isa isa = SupportedIsas().back();
        const Compensation compensation(policy, states, grads, isa);
        const Number compute = compensation.compute();
        const double of_policy[] = {0.5, 0.25, 0.125};
        const double of_rule[] = {0.5, 0.75, 0};
        std::vector<Array> got =
            Arrays(size, states, grads, compute, &random);
        const std::vector<Array> want = got;
        std::vector<void*> memory(policy.states(), got[4].data());

        Pass pass(compute);
        compensation.AddStagesBefore(of_policy, &pass);
        pass.AddStage({FindStep(RuleId::kMomentum, states, compute, isa),
                       of_rule, 3, 4 * SizeOf(states), false, /*scratch=*/2});
        compensation.AddStagesAfter(of_policy, &pass);
        std::vector<void*> operands;
        compensation.AddOperandsBefore(got[0].data(), got[2].data(),
                                       got[3].data(), memory, &operands);
        operands.insert(operands.end(),
                        {got[0].data(), got[1].data(), nullptr});
        compensation.AddOperandsAfter(got[0].data(), memory, &operands);
        pass.AddVariable(size, operands);
        // Read and written: the variable, its slot, the policy's state. Read:
        // the origin, the gradient.
        EXPECT_EQ(pass.bytes(),
                  size * (5.0 * SizeOf(states) + SizeOf(grads) +
                          2.0 * policy.states() * SizeOf(compute)));
        RunPass(Pool(3), pass);

        void* const all[] = {want[0].data(), want[1].data(), want[3].data(),
                             want[2].data(), want[4].data()};
        CompensatedReference(policy, RuleId::kMomentum, states, grads, all,
                             of_rule, of_policy, size);
        for (int a = 0; a < 5; ++a) {
          ExpectSame(got[a], want[a],
                     a == 3 ? grads : a == 4 ? compute : states,
                     std::string(policy.name()) + ", array " +
                         std::to_string(a));
        }
      }
    }
  }
}

}  // namespace
}  // namespace wrapopt
