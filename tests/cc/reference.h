// The step of a rule, one element after the other: what each loop of the engine
// must compute, to the bit.
#ifndef WRAPOPT_TESTS_CC_REFERENCE_H_
#define WRAPOPT_TESTS_CC_REFERENCE_H_

#include <cstddef>
#include <utility>
#include <vector>

#include "cc/engine/number.h"
#include "cc/engine/subnormals.h"
#include "cc/rules/rules.h"

namespace wrapopt {

// The pairs of states and inputs for which there are loops.
constexpr std::pair<Number, Number> kPairs[] = {
    {Number::kHalf, Number::kHalf},
    {Number::kHalf, Number::kFloat},
    {Number::kBfloat16, Number::kBfloat16},
    {Number::kBfloat16, Number::kFloat},
    {Number::kFloat, Number::kFloat},
    {Number::kFloat, Number::kHalf},
    {Number::kFloat, Number::kBfloat16},
    {Number::kDouble, Number::kDouble},
};

template <class Rule, class State, class Input, size_t... s, size_t... i,
          size_t... c>
void Steps(void* const* operands, const double* scalars, size_t elements,
           std::index_sequence<s...>, std::index_sequence<i...>,
           std::index_sequence<c...>) {
  using Compute = typename ComputeTypeOf<State>::type;
  const FlushSubnormals flush;
  for (size_t e = 0; e < elements; ++e) {
    Compute state[] = {
        static_cast<Compute>(Load(static_cast<State*>(operands[s])[e]))...};
    const Compute input[] = {static_cast<Compute>(
        Load(static_cast<const Input*>(operands[sizeof...(s) + i])[e]))...};
    Rule::Step(state[s]..., input[i]..., static_cast<Compute>(scalars[c])...);
    (Store(static_cast<State*>(operands[s])[e], state[s]), ...);
  }
}

template <class State, class Input>
void Reference(RuleId rule, void* const* operands, const double* scalars,
               size_t elements) {
  switch (rule) {
#define WRAPOPT_STEPS(name, s, i, c, sparse)                     \
  case RuleId::k##name:                                          \
    return Steps<name, State, Input>(                            \
        operands, scalars, elements,                             \
        std::make_index_sequence<CountNames(s)>(),               \
        std::make_index_sequence<CountNames(i)>(),               \
        std::make_index_sequence<CountNames(c)>());
    WRAPOPT_RULES(WRAPOPT_STEPS)
#undef WRAPOPT_STEPS
  }
}

inline void Reference(RuleId rule, Number states, Number inputs,
                      void* const* operands, const double* scalars,
                      size_t elements) {
  const auto run = [&](auto reference) {
    reference(rule, operands, scalars, elements);
  };
  switch (states) {
    case Number::kHalf:
      return run(inputs == Number::kHalf ? &Reference<Half, Half>
                                         : &Reference<Half, float>);
    case Number::kBfloat16:
      return run(inputs == Number::kBfloat16 ? &Reference<Bfloat16, Bfloat16>
                                             : &Reference<Bfloat16, float>);
    case Number::kFloat:
      return run(inputs == Number::kFloat  ? &Reference<float, float>
                 : inputs == Number::kHalf ? &Reference<float, Half>
                                           : &Reference<float, Bfloat16>);
    case Number::kDouble:
      return run(&Reference<double, double>);
  }
}

// Scalars for a rule: numbers in (0, 1), and `option` for each attribute.
inline std::vector<double> ScalarsOf(const RuleInfo& rule, bool option) {
  std::vector<double> scalars;
  for (size_t begin = 0; scalars.size() < CountNames(rule.scalars);) {
    const size_t end = std::min(rule.scalars.find(' ', begin),
                                rule.scalars.size());
    scalars.push_back(rule.scalars[end - 1] == '?'
                          ? option
                          : 0.9 - 0.11 * static_cast<double>(scalars.size()));
    begin = end + 1;
  }
  return scalars;
}

}  // namespace wrapopt

#endif  // WRAPOPT_TESTS_CC_REFERENCE_H_
