// Compares the GPU kernels with the CPU kernels bit for bit, and with the same
// steps in double.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <iterator>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "cc/engine/compensation.h"
#include "cc/engine/elementwise.h"
#include "cc/engine/isa.h"
#include "cc/engine/number.h"
#include "cc/gpu/check/device.h"
#include "cc/gpu/check/operands.h"
#include "cc/gpu/launcher.h"
#include "cc/gpu/table.h"
#include "cc/rules/rules.h"

namespace wrapopt {
namespace gpu {
namespace {

// A rule, or no rule and averages of `number`, with `targets` averages. The
// policy, if any, compensates the gradients.
struct Case {
  const RuleInfo* rule;
  Number number;
  Number input;
  Number average;
  int sources;
  int targets;
  std::vector<uint64_t> sizes;
  int chunk_log2 = 0;
  bool is_captured = false;
  const PolicyInfo* policy = nullptr;

  std::string Name() const {
    return std::string(rule == nullptr ? "average" : rule->name) +
           (policy == nullptr ? "" : std::string(" by ") + policy->name()) +
           " of " +
           NameOf(number) + " and " + NameOf(input) + ", " +
           std::to_string(sources) + " sources, " + std::to_string(targets) +
           " averages in " + NameOf(average) + ", " +
           std::to_string(sizes.size()) + " variables" +
           (is_captured ? ", captured" : "");
  }
};

Isa TheIsa() {
  Isa isa;
  std::string error;
  if (!ChosenIsa(&isa, &error)) Fail(error);
  return isa;
}

// Whether numbers are near those of one of `wants`, or between two of these.
bool IsNear(const Doubles& got, const std::vector<Doubles>& wants,
            const std::vector<std::unique_ptr<Operand>>& operands,
            const std::string& what) {
  bool right = true;
  for (size_t o = 0; o < operands.size(); ++o) {
    // An average is of the stored value.
    const double epsilon = std::max(EpsilonOf(operands[o]->number),
                                    EpsilonOf(operands[0]->number));
    double worst = 0;
    for (size_t i = 0; i < got[o].size(); ++i) {
      double low = wants[0][o][i], high = low;
      for (const Doubles& want : wants) {
        low = std::min(low, want[o][i]);
        high = std::max(high, want[o][i]);
      }
      const double x = got[o][i];
      const double error = !(x >= low) ? low - x : !(x <= high) ? x - high : 0;
      const double epsilons =
          error / std::max(1.0, std::abs(wants[0][o][i])) / epsilon;
      // True also for a NaN.
      if (!(epsilons <= worst)) worst = epsilons;
    }
    if (worst <= 8) continue;
    std::printf("  WRONG: %s, array %zu: %g epsilon from double\n",
                what.c_str(), o, worst);
    right = false;
  }
  return right;
}

bool CheckStep(const Case& c) {
  const Isa isa = TheIsa();
  const Layout layout(c.sizes);
  const size_t states = c.rule == nullptr ? 0 : CountNames(c.rule->states);
  const size_t inputs = c.rule == nullptr ? 0 : CountNames(c.rule->inputs);
  Update update;
  update.is_double = c.number == Number::kDouble;
  update.state = c.number;
  update.input = c.input;
  update.chunk_log2 = c.chunk_log2;
  std::vector<std::unique_ptr<Operand>> operands;
  const auto add = [&](Number number, bool has_signs) {
    operands.push_back(std::make_unique<Operand>(layout, number, has_signs));
  };
  for (size_t s = 0; s < states; ++s) add(c.number, /*has_signs=*/s == 0);
  for (size_t i = 0; i < inputs; ++i) add(c.input, true);
  if (c.rule != nullptr) {
    update.rule = c.rule->id;
    update.scalars = ScalarsOf(*c.rule);
  }
  const Number sum = update.is_double ? Number::kDouble : Number::kFloat;
  const size_t memory = c.policy == nullptr ? 0 : c.policy->states();
  if (c.policy != nullptr) {
    update.policy = c.policy;
    update.policy_scalars = {0.5, 0.25, 0.125};
    update.policy_scalars.resize(c.policy->scalars());
    add(c.number, true);
    for (size_t m = 0; m < memory; ++m) add(sum, false);
  }
  for (int s = 0; s < c.sources; ++s) {
    add(s == 0 ? c.number : c.input, true);
    update.sources.push_back({0.3 + s, operands.back()->number});
  }
  for (int t = 0; t < c.targets; ++t) {
    add(c.average, true);
    update.targets.push_back({0.1 * (t + 1), c.average});
  }

  // The launcher has a place for each state that a policy may have.
  const size_t lacking = c.policy == nullptr ? 0 : kMostPolicyStates - memory;
  update.arrays = operands.size() + lacking;
  update.elements = layout.sizes;
  for (size_t v = 0; v < layout.sizes.size(); ++v) {
    for (size_t o = 0; o < operands.size(); ++o) {
      const Operand& operand = *operands[o];
      update.addresses.push_back(operand.device.address() +
                                 layout.begins[v] * SizeOf(operand.number));
      if (c.policy != nullptr && o == states + inputs + memory) {
        update.addresses.resize(update.addresses.size() + lacking);
      }
    }
  }
  const Doubles before =
      ReadDoubles(layout, operands, /*from_device=*/false);
  if (c.is_captured) {
    Graph(update).Run();
  } else {
    Run(update);
  }
  Wait();

  // The same on the CPU, stage by stage, over one array of each operand.
  const auto run_on_cpu = [&](uint64_t size, Number state, Number input,
                              Number average, Number sum,
                              const std::vector<Number>& numbers,
                              const std::vector<void*>& arrays) {
    const auto step = [&](RuleId id, Number state, Number input,
                          std::vector<void*> operands,
                          const std::vector<double>& scalars) {
      FindStep(id, state, input, isa)
          .loop(operands.data(), scalars.data(), 0, size, Ahead());
    };
    std::vector<char> scratch(size * SizeOf(sum));
    void* value = scratch.data();
    Number value_number = sum;
    size_t next = states + inputs;
    if (c.rule != nullptr) {
      std::vector<void*> of_rule(arrays.begin(), arrays.begin() + next);
      Compensation compensation;
      std::vector<char> grad(size * SizeOf(sum)), before(grad);
      if (c.policy != nullptr) {
        compensation = Compensation(*c.policy, state, input, isa);
        compensation.Before(update.policy_scalars.data(), arrays[0],
                            arrays[next], arrays[states], /*is_sum=*/false,
                            arrays.data() + next + 1, size, grad.data(),
                            before.data());
        of_rule.back() = grad.data();
      }
      step(c.rule->id, state, c.policy == nullptr ? input : sum, of_rule,
           update.scalars);
      if (c.policy != nullptr) {
        compensation.After(update.policy_scalars.data(), arrays[0],
                           arrays.data() + next + 1, size, before.data());
        next += 1 + memory;
      }
      value = arrays[0];
      value_number = state;
    }
    for (int s = 0; s < c.sources; ++s, ++next) {
      step(RuleId::kWeightedSum, sum, numbers[next], {value, arrays[next]},
           {update.sources[s].scalar, s == 0 ? 1.0 : 0.0});
    }
    for (int t = 0; t < c.targets; ++t, ++next) {
      step(RuleId::kEma, average, value_number, {arrays[next], value},
           {update.targets[t].scalar});
    }
  };
  std::vector<Number> numbers;
  for (const auto& operand : operands) numbers.push_back(operand->number);
  for (size_t v = 0; v < layout.sizes.size(); ++v) {
    std::vector<void*> arrays;
    for (const auto& operand : operands) {
      arrays.push_back(operand->host.data() +
                       layout.begins[v] * SizeOf(operand->number));
    }
    run_on_cpu(layout.sizes[v], c.number, c.input, c.average, sum, numbers,
               arrays);
  }
  // A rule may be discontinuous, as a sign is. If roundings decide the side of
  // a jump, inputs that differ by some roundings may be on the other side.
  constexpr double kRoundings = 4;
  std::vector<Doubles> wants;
  wants.reserve(3);
  for (const double roundings : {0.0, -kRoundings, kRoundings}) {
    Doubles& want = wants.emplace_back(before);
    for (size_t i = states; i < states + inputs; ++i) {
      for (double& x : want[i]) x *= 1 + roundings * EpsilonOf(sum);
    }
    std::vector<void*> arrays;
    for (std::vector<double>& array : want) arrays.push_back(array.data());
    run_on_cpu(want[0].size(), Number::kDouble, Number::kDouble,
               Number::kDouble, Number::kDouble,
               std::vector<Number>(operands.size(), Number::kDouble), arrays);
  }

  bool right = true;
  for (size_t i = 0; i < operands.size(); ++i) {
    right &= IsEqual(*operands[i], c.Name() + ", array " + std::to_string(i));
  }
  return right & IsNear(ReadDoubles(layout, operands, /*from_device=*/true),
                        wants, operands, c.Name());
}

// Checks rows that have one, several and very many gradients.
bool CheckSum(Number number, bool is_double) {
  const Number sum_number = is_double ? Number::kDouble : Number::kFloat;
  constexpr uint64_t kRows = 300, kGrads = 20000, kElements = 37;
  const Layout grad_layout({kGrads * kElements});
  const Layout sum_layout({kRows * kElements});
  Operand grads(grad_layout, number, true), sums(sum_layout, sum_number, true);
  RowSum sum{grads.device.address() + grad_layout.begins[0] * SizeOf(number),
             number,
             sums.device.address() + sum_layout.begins[0] * SizeOf(sum_number),
             is_double, kElements, {}};
  uint64_t next = 0;
  for (uint64_t row = 0; row < kRows; ++row) {
    sum.runs.push_back({row, {}});
    for (uint64_t i = row == 7 ? 9000 : row % 5; i > 0; --i) {
      sum.runs.back().grads.push_back(next++ * 7 % kGrads);
    }
  }
  Run(sum);
  Wait();
  for (const RowSum::Run& run : sum.runs) {
    for (const uint64_t grad : run.grads) {
      void* arrays[] = {
          sums.host.data() + (sum_layout.begins[0] + run.row * kElements) *
                                 SizeOf(sum_number),
          grads.host.data() +
              (grad_layout.begins[0] + grad * kElements) * SizeOf(number)};
      const double scalars[] = {1, 0};
      FindStep(RuleId::kWeightedSum, sum_number, number, TheIsa())
          .loop(arrays, scalars, 0, kElements, Ahead());
    }
  }
  return IsEqual(sums, std::string("sums of rows of ") + NameOf(number)) &&
         IsEqual(grads, "gradients");
}

// A step of some rows of a table, without a rule of its averages alone, and
// then all rows catch up.
bool CheckLazy(const RuleInfo* rule, Number number, Number input,
               uint64_t rows, uint64_t row_elements, int chunk_log2 = 0) {
  const Layout layout({rows * row_elements}), layout_of_logs({rows + 1});
  const std::string name =
      std::string("lazy ") + (rule == nullptr ? "average" : rule->name) +
      " of " + NameOf(number) + " and " + NameOf(input) + ", " +
      std::to_string(rows) + " rows of " + std::to_string(row_elements);
  const Isa isa = TheIsa();
  Update update;
  update.is_double = number == Number::kDouble;
  update.state = number;
  update.input = input;
  std::vector<std::unique_ptr<Operand>> operands;
  const size_t states = rule == nullptr ? 1 : CountNames(rule->states);
  for (size_t s = 0; s < states; ++s) {
    operands.push_back(std::make_unique<Operand>(layout, number, s == 0));
  }
  if (rule == nullptr) {
    update.sources = {{1, number}};
  } else {
    update.rule = rule->id;
    update.scalars = ScalarsOf(*rule);
    operands.push_back(std::make_unique<Operand>(layout, input, true));
  }
  const size_t targets = operands.size();
  // The second of the averages copies the value.
  update.targets = {{0.25, input}, {1, input}};
  const double log_decay[] = {std::log(0.75), -800};
  std::vector<std::unique_ptr<Operand>> logs;
  for (int k = 0; k < 2; ++k) {
    operands.push_back(std::make_unique<Operand>(layout, input, true));
    Operand& log = *logs.emplace_back(
        std::make_unique<Operand>(layout_of_logs, Number::kDouble, false));
    double* const of_row =
        reinterpret_cast<double*>(log.host.data()) + layout_of_logs.begins[0];
    // Some rows have caught up, others lag by more than numbers can tell.
    constexpr double kNow = -60;
    const double lags[] = {0, 1e-9, 0.01, 0.3, 2, 30, 59};
    for (uint64_t r = 0; r < rows; ++r) {
      of_row[r] = kNow + lags[generator() % std::size(lags)];
    }
    of_row[rows] = kNow;
    log.device.Write(log.host);
  }
  const auto element = [&](Operand& operand, uint64_t row) {
    return (layout.begins[0] + row * row_elements) * SizeOf(operand.number);
  };
  const auto of_row = [&](Operand& log) {
    return reinterpret_cast<double*>(log.host.data()) +
           layout_of_logs.begins[0];
  };
  const auto address_of_log = [&](const Operand& log, uint64_t row) {
    return log.device.address() +
           (layout_of_logs.begins[0] + row) * sizeof(double);
  };
  // Adds rows of these arrays.
  const auto add = [&](Update* to, uint64_t begin, uint64_t end,
                       const std::vector<size_t>& arrays) {
    to->elements.push_back((end - begin) * row_elements);
    to->row_elements.push_back(end - begin == 1 ? 0 : row_elements);
    for (const size_t a : arrays) {
      to->addresses.push_back(operands[a]->device.address() +
                              element(*operands[a], begin));
    }
    for (const uint64_t row : {begin, rows}) {
      for (const auto& log : logs) {
        to->addresses.push_back(address_of_log(*log, row));
      }
    }
    to->arrays = arrays.size() + 2 * logs.size();
  };
  const auto catch_up_on_cpu = [&](uint64_t begin, uint64_t end) {
    for (int k = 0; k < 2; ++k) {
      Operand& shadow = *operands[targets + k];
      double* const log = of_row(*logs[k]);
      // Copied: a GPU marks them later.
      std::vector<double> marks(log + begin, log + end);
      FindMoveRows(input, number, isa)(
          shadow.host.data() + element(shadow, begin),
          operands[0]->host.data() + element(*operands[0], begin),
          /*rate=*/nullptr, marks.data(), /*now=*/log[rows], /*mark=*/0,
          row_elements, /*rows=*/nullptr, end - begin);
    }
  };
  const auto are_equal = [&](const std::string& what) {
    bool right = true;
    for (size_t i = 0; i < operands.size(); ++i) {
      right &= IsEqual(*operands[i],
                       name + what + ", array " + std::to_string(i));
    }
    for (const auto& log : logs) {
      right &= IsEqual(*log, name + what + ", log decays");
    }
    return right;
  };

  std::vector<size_t> all(operands.size());
  std::iota(all.begin(), all.end(), 0);
  RowMarks marks;
  marks.touched.emplace_back();
  for (uint64_t begin = 0, end; begin < rows; begin = end) {
    end = begin + 1;
    if (generator() % 4 == 0) continue;
    // By itself or as one with those that follow.
    if (row_elements <= kMaxRowElements) {
      while (end < rows && generator() % 3 == 0) ++end;
    }
    add(&update, begin, end, all);
    for (uint64_t r = begin; r < end; ++r) marks.touched[0].push_back(r);
    catch_up_on_cpu(begin, end);
    const size_t elements = (end - begin) * row_elements;
    std::vector<void*> arrays;
    for (const auto& operand : operands) {
      arrays.push_back(operand->host.data() + element(*operand, begin));
    }
    if (rule != nullptr) {
      FindStep(rule->id, number, input, isa)
          .loop(arrays.data(), update.scalars.data(), 0, elements, Ahead());
    }
    for (int k = 0; k < 2; ++k) {
      void* const average[] = {arrays[targets + k], arrays[0]};
      FindStep(RuleId::kEma, input, number, isa)
          .loop(average, &update.targets[k].scalar, 0, elements, Ahead());
    }
  }
  for (int k = 0; k < 2; ++k) {
    marks.averages.push_back(
        {address_of_log(*logs[k], 0), rows, log_decay[k], 0});
    double* const log = of_row(*logs[k]);
    log[rows] += log_decay[k];
    for (const uint64_t r : marks.touched[0]) log[r] = log[rows];
  }
  Run(update);
  Run(marks);
  Wait();
  bool right = are_equal("");

  Update catch_up;
  catch_up.is_double = update.is_double;
  catch_up.is_step = false;
  catch_up.sources = {{1, number}};
  catch_up.targets = update.targets;
  const uint64_t at_once = row_elements <= kMaxRowElements ? rows : 1;
  for (uint64_t r = 0; r < rows; r += at_once) {
    add(&catch_up, r, r + at_once, {0, targets, targets + 1});
  }
  catch_up_on_cpu(0, rows);
  catch_up.chunk_log2 = chunk_log2;
  Run(catch_up);
  Wait();
  return right & are_equal(", all rows");
}

// Arrays that lie farther apart than a table can tell.
bool CheckFar() {
  constexpr size_t kBytes = (size_t{17} << 30) + 4096;
  if (FreeMemory() < kBytes + (size_t{1} << 30)) {
    std::printf("no memory for arrays 17 GiB apart: not checked\n");
    return true;
  }
  constexpr uint64_t kElements = 999;
  Array buffer(kBytes);
  Update update;
  update.sources = {{1, Number::kFloat}};
  update.targets = {{1, Number::kFloat}};
  update.arrays = 2;
  std::vector<Address> shadows;
  for (const uint64_t begin : {size_t{0}, kBytes - 8192}) {
    const Address value = buffer.address() + begin, shadow = value + 4096;
    Call("cuMemsetD8_v2", value, static_cast<unsigned char>(0), size_t{8192});
    Call("cuMemsetD8_v2", value, static_cast<unsigned char>(0x3c),
         4 * kElements);
    update.elements.push_back(kElements);
    update.addresses.insert(update.addresses.end(), {value, shadow});
    shadows.push_back(shadow);
  }
  Run(update);
  Wait();
  bool right = true;
  for (const Address shadow : shadows) {
    std::vector<char> got(4096), want(4096);
    Call("cuMemcpyDtoH_v2", static_cast<void*>(got.data()), shadow, got.size());
    std::fill_n(want.begin(), 4 * kElements, 0x3c);
    right &= got == want;
  }
  if (!right) std::printf("  WRONG: arrays 17 GiB apart\n");
  return right;
}

int CheckNumbers() {
  const std::pair<Number, Number> pairs[] = {
      {Number::kHalf, Number::kHalf},
      {Number::kHalf, Number::kFloat},
      {Number::kBfloat16, Number::kBfloat16},
      {Number::kBfloat16, Number::kFloat},
      {Number::kFloat, Number::kFloat},
      {Number::kDouble, Number::kDouble}};
  int wrong = 0, checked = 0;
  auto count = [&](bool right) {
    ++checked;
    wrong += !right;
  };
  for (const auto& [number, input] : pairs) {
    // More than fit into a launch with small tables; once also with large ones.
    const auto many = ManySizes(number == Number::kFloat ? 3000 : 400);
    for (const RuleInfo& rule : kRules) {
      if (rule.inputs != "grad") continue;
      count(CheckStep({&rule, number, input, input, 0, 2, many}));
      count(CheckStep({&rule, number, input, number, 0, 0, FewSizes()}));
      // Each rule with each policy, of some of these numbers.
      const PolicyInfo& policy =
          kPolicies[(&rule - kRules + static_cast<int>(number)) %
                    std::size(kPolicies)];
      count(CheckStep({&rule, number, input, input, 0, 1, FewSizes(),
                       /*chunk_log2=*/0, /*is_captured=*/false, &policy}));
    }
    for (const int sources : {1, 3}) {
      count(CheckStep({nullptr, number, input, input, sources, 2, many}));
      count(CheckStep({nullptr, number, input, input, sources, 1,
                       FewSizes()}));
    }
    count(CheckSum(input, number == Number::kDouble));
    for (const RuleInfo& rule : kRules) {
      if (rule.inputs != "grad" || rule.sparse != Sparse::kRows) continue;
      // Once more rows than a launch takes.
      count(CheckLazy(&rule, number, input, 5000, 5));
      count(CheckLazy(&rule, number, input, 100, 16));
    }
    count(CheckLazy(nullptr, number, input, 5000, 1));
    count(CheckLazy(nullptr, number, input, 300, 8));
    count(CheckLazy(nullptr, number, input, 12, 5000));
    count(CheckLazy(nullptr, number, input, 5, kMaxRowElements + 1));
  }
  // A table that takes several launches, each of whole rows.
  count(CheckLazy(nullptr, Number::kFloat, Number::kFloat, 110000, 5,
                  /*chunk_log2=*/3));
  const RuleInfo& adam = Info(RuleId::kAdam);
  Case captured = {&adam, Number::kFloat, Number::kFloat, Number::kFloat, 0, 2,
                   ManySizes(3000)};
  captured.is_captured = true;
  count(CheckStep(captured));
  Case compensated = captured;
  compensated.policy = std::end(kPolicies) - 1;
  count(CheckStep(compensated));
  // A variable that takes several launches.
  Case long_one = captured;
  long_one.chunk_log2 = 3;
  long_one.sizes = {5, (uint64_t{kMaxChunks} << 3) + 77, 9};
  count(CheckStep(long_one));
  count(CheckFar());
  std::printf("%d of %d right\n", checked - wrong, checked);
  return wrong == 0 ? 0 : 1;
}

}  // namespace
}  // namespace gpu
}  // namespace wrapopt

int main() {
  wrapopt::gpu::Start();
  return wrapopt::gpu::CheckNumbers();
}
