// What is around the step of a rule in a GPU kernel: nothing, or with
// WRAPOPT_COMPENSATED a policy that compensates gradients for their age. Uses
// the macro WRAPOPT_DEVICE of cc/gpu/elementwise.cu, which includes this.
#ifndef WRAPOPT_CC_GPU_COMPENSATION_H_
#define WRAPOPT_CC_GPU_COMPENSATION_H_

#include <cstddef>
#include <utility>

#include "cc/engine/number.h"
#include "cc/gpu/access.h"
#include "cc/gpu/table.h"
#include "cc/rules/compensation.h"
#include "cc/rules/rules.h"

namespace wrapopt {
namespace gpu {
namespace {

#if !defined(WRAPOPT_COMPENSATED)

struct ThePolicy {
  static constexpr size_t kArrays = 0;
  static constexpr size_t kScalars = 0;

  template <class Compute, class Access>
  class Of {
   public:
    WRAPOPT_DEVICE Of(const Header&, const Word*, const Arrays&,
                      const Access&) {}
    WRAPOPT_DEVICE void Before(const Compute (&)[Access::kCount],
                               Compute (&)[Access::kCount]) {}
    WRAPOPT_DEVICE void After(const Compute (&)[Access::kCount]) {}
  };
};

#else

// A policy of cc/rules/compensation.h. Its arrays are the weights that the
// gradient was computed from, and its states. A row that has no gradient has
// none of these, and is not compensated.
struct ThePolicy {
  static constexpr size_t kArrays = 1 + kMostPolicyStates;
  static constexpr size_t kScalars = kMostPolicyScalars;

  template <class Compute, class Access>
  class Of {
   public:
    static constexpr int kCount = Access::kCount;

    // Starts the loads.
    WRAPOPT_DEVICE Of(const Header& header, const Word* scalars,
                      const Arrays& arrays, const Access& access)
        : policy_(static_cast<RuleId>(header.policy)),
          var_number_(static_cast<Number>(header.state)),
          scalars_(scalars),
          arrays_(arrays),
          access_(access),
          is_idle_(arrays.FindInput<Compute>(0, var_number_) == nullptr) {
      if (is_idle_) return;
      access.Load(arrays.Find<Compute>(0, var_number_), var_number_, &origin_);
#pragma unroll
      for (size_t m = 0; m < kMostPolicyStates; ++m) {
        LoadInput(access, Memory(m), kNumber, &memory_[m]);
      }
    }

    // `grad` becomes the gradient that the step takes.
    WRAPOPT_DEVICE void Before(const Compute (&var)[kCount],
                               Compute (&grad)[kCount]) {
      if (is_idle_) return;
      Compute origin[kCount], memory[kMostPolicyStates][kCount];
      Access::Unpack(origin_, var_number_, origin);
#pragma unroll
      for (size_t m = 0; m < kMostPolicyStates; ++m) {
        Access::Unpack(memory_[m], kNumber, memory[m]);
      }
      switch (policy_) {
#define WRAPOPT_BEFORE(rule, measures)                       \
  case RuleId::k##rule: {                                    \
    constexpr RuleInfo kInfo = Info(RuleId::k##rule);        \
    constexpr size_t kStates = CountNames(kInfo.states) - 1; \
    constexpr size_t kCounted = CountNames(kInfo.scalars);   \
    Before<rule>(var, origin, memory, grad,                  \
                 std::make_index_sequence<kStates>(),        \
                 std::make_index_sequence<kCounted>());      \
    rate_ = measures ? kCounted : 0;                         \
    break;                                                   \
  }
        WRAPOPT_POLICIES(WRAPOPT_BEFORE)
#undef WRAPOPT_BEFORE
        default:
          break;
      }
#pragma unroll
      for (int j = 0; j < kCount; ++j) before_[j] = var[j];
#pragma unroll
      for (size_t m = 0; m < kMostPolicyStates; ++m) {
        Access::Pack(memory[m], kNumber, &memory_[m]);
      }
    }

    // Measures the step, if the policy does, and stores the policy's states.
    WRAPOPT_DEVICE void After(const Compute (&var)[kCount]) {
      if (is_idle_) return;
      if (rate_ > 0) {
        Compute k, step_size[kCount];
        Read(scalars_[rate_], &k);
        Access::Unpack(memory_[0], kNumber, step_size);
#pragma unroll
        for (int j = 0; j < kCount; ++j) {
          StepSize::Step(step_size[j], before_[j], var[j], k);
        }
        Access::Pack(step_size, kNumber, &memory_[0]);
      }
#pragma unroll
      for (size_t m = 0; m < kMostPolicyStates; ++m) {
        if (char* const array = Memory(m)) {
          access_.Store(array, kNumber, memory_[m]);
        }
      }
    }

   private:
    // That of the policy's states.
    static constexpr Number kNumber =
        sizeof(Compute) == 8 ? Number::kDouble : Number::kFloat;

    WRAPOPT_DEVICE char* Memory(size_t m) const {
      return const_cast<char*>(arrays_.FindInput<Compute>(1 + m, kNumber));
    }

    template <class Rule, size_t... s, size_t... c>
    WRAPOPT_DEVICE void Before(const Compute (&var)[kCount],
                               const Compute (&origin)[kCount],
                               Compute (&memory)[kMostPolicyStates][kCount],
                               Compute (&grad)[kCount],
                               std::index_sequence<s...>,
                               std::index_sequence<c...>) {
      Compute k[kScalars];
      (Read(scalars_[c], &k[c]), ...);
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        const Compute stale = grad[j];
        grad[j] = var[j] - origin[j];
        Rule::Step(memory[s][j]..., grad[j], stale, k[c]...);
      }
    }

    const RuleId policy_;
    const Number var_number_;
    const Word* const scalars_;
    const Arrays arrays_;
    const Access access_;
    const bool is_idle_;
    size_t rate_ = 0;  // The index of the scalar of StepSize, if it measures.
    typename Access::Raw origin_, memory_[kMostPolicyStates];
    Compute before_[kCount];
  };
};

#endif

}  // namespace
}  // namespace gpu
}  // namespace wrapopt

#endif  // WRAPOPT_CC_GPU_COMPENSATION_H_
