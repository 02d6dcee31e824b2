// The GPU kernels without TensorFlow:
//
//   check numbers    compares them with the CPU's, bit for bit, and with the
//                    same steps in double
//   check huge       takes arrays of more than 2^32 elements (2^31, where there
//                    is not the memory)
//   check bandwidth  measures them beside a copy
//   check chunks     measures them with blocks of each size
//
// Needs a driver and a GPU, or the tests' fake one.
#include <dlfcn.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "cc/gpu/driver.h"
#include "cc/gpu/images.h"
#include "cc/gpu/launcher.h"
#include "cc/gpu/table.h"
#include "cc/kernels/elementwise_cpu.h"
#include "cc/kernels/isa.h"

namespace wrapopt {
namespace gpu {
namespace {

void Fail(const std::string& what) {
  std::fprintf(stderr, "%s\n", what.c_str());
  std::exit(2);
}

// What the launcher has no use for: memory, copies, streams, events.
template <class... Arguments>
void Call(const char* name, Arguments... arguments) {
  static void* const library = dlopen("libcuda.so.1", RTLD_NOW);
  using Function = Result (*)(Arguments...);
  const auto function =
      library == nullptr
          ? nullptr
          : reinterpret_cast<Function>(dlsym(library, name));
  if (function == nullptr) Fail(std::string("no ") + name + " in libcuda.so.1");
  const Result result = function(arguments...);
  if (result != 0) Fail(ErrorText(name, result));
}

class Array {
 public:
  explicit Array(size_t bytes) : bytes_(bytes) {
    Call("cuMemAlloc_v2", &address_, std::max<size_t>(bytes, 1));
  }
  ~Array() { Call("cuMemFree_v2", address_); }
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;

  void Write(const std::vector<char>& data) {
    Call("cuMemcpyHtoD_v2", address_, static_cast<const void*>(data.data()),
         data.size());
  }
  std::vector<char> Read() const {
    std::vector<char> data(bytes_);
    Call("cuMemcpyDtoH_v2", static_cast<void*>(data.data()), address_, bytes_);
    return data;
  }
  Address address() const { return address_; }

 private:
  const size_t bytes_;
  Address address_ = 0;
};

Stream stream;

void Wait() { Call("cuStreamSynchronize", stream); }

template <class Launch>
void Run(const Launch& launch) {
  const std::string error = Enqueue(launch, stream);
  if (!error.empty()) Fail(error);
}

// What an update enqueues, as a CUDA graph. Its kernels must have been loaded.
class Graph {
 public:
  explicit Graph(const Update& update) {
    constexpr int kGlobal = 0;  // Nothing else may be done in the meantime.
    Call("cuStreamBeginCapture_v2", stream, kGlobal);
    ::wrapopt::gpu::Run(update);
    Call("cuStreamEndCapture", stream, &graph_);
  }
  ~Graph() { Call("cuGraphDestroy", graph_); }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  size_t launches() const {
    size_t count;
    Call("cuGraphGetNodes", graph_, static_cast<void*>(nullptr), &count);
    return count;
  }

  void Run() const {
    void* executable;
    Call("cuGraphInstantiateWithFlags", &executable, graph_, 0ull);
    Call("cuGraphLaunch", executable, stream);
    Wait();
    Call("cuGraphExecDestroy", executable);
  }

 private:
  void* graph_;
};

const char* NameOf(Number number) {
  switch (number) {
    case Number::kHalf:
      return "half";
    case Number::kBfloat16:
      return "bfloat16";
    case Number::kFloat:
      return "float";
    case Number::kDouble:
      return "double";
  }
  return "";
}

void Put(Number number, char* to, double x) {
  switch (number) {
    case Number::kHalf:
      return Store(*reinterpret_cast<Half*>(to), static_cast<float>(x));
    case Number::kBfloat16:
      return Store(*reinterpret_cast<Bfloat16*>(to), static_cast<float>(x));
    case Number::kFloat:
      return Store(*reinterpret_cast<float*>(to), static_cast<float>(x));
    case Number::kDouble:
      return Store(*reinterpret_cast<double*>(to), x);
  }
}

double Get(Number number, const char* from) {
  switch (number) {
    case Number::kHalf:
      return Load(*reinterpret_cast<const Half*>(from));
    case Number::kBfloat16:
      return Load(*reinterpret_cast<const Bfloat16*>(from));
    case Number::kFloat:
      return *reinterpret_cast<const float*>(from);
    case Number::kDouble:
      return *reinterpret_cast<const double*>(from);
  }
  return 0;
}

// From 1 to the next number.
double EpsilonOf(Number number) {
  switch (number) {
    case Number::kHalf:
      return 0x1p-10;
    case Number::kBfloat16:
      return 0x1p-7;
    case Number::kFloat:
      return 0x1p-23;
    case Number::kDouble:
      return 0x1p-52;
  }
  return 0;
}

std::mt19937 generator(1);

// Arrays of many variables in one buffer, with space between them that nothing
// may touch. Some begin where 16 bytes do not.
struct Layout {
  explicit Layout(const std::vector<uint64_t>& sizes) : sizes(sizes) {
    for (size_t i = 0; i < sizes.size(); ++i) {
      total = (total + 63) / 64 * 64 + 64 + (i % 5 == 4 ? 1 + i % 7 : 0);
      begins.push_back(total);
      total += sizes[i];
    }
    total += 64;
  }

  std::vector<uint64_t> sizes;
  std::vector<uint64_t> begins;
  uint64_t total = 0;
};

struct Operand {
  // Numbers of which no rule makes a NaN: its bits would be the processor's.
  Operand(const Layout& layout, Number number, bool has_signs)
      : number(number),
        host(layout.total * SizeOf(number)),
        device(host.size()) {
    std::uniform_real_distribution<double> uniform(0.6, 1);
    for (uint64_t i = 0; i < layout.total; ++i) {
      const double x = uniform(generator);
      Put(number, host.data() + i * SizeOf(number),
          has_signs && generator() % 2 ? -x : x);
    }
    device.Write(host);
  }

  const Number number;
  std::vector<char> host;
  Array device;
};

// Compares all bytes, those between the variables too.
bool IsEqual(const Operand& operand, const std::string& what) {
  const std::vector<char> got = operand.device.Read();
  if (got == operand.host) return true;
  const size_t at =
      std::mismatch(got.begin(), got.end(), operand.host.begin()).first -
      got.begin();
  std::printf("  WRONG: %s, first at element %zu of %zu\n", what.c_str(),
              at / SizeOf(operand.number),
              got.size() / SizeOf(operand.number));
  return false;
}

// Below, at and above what a thread, a block and a chunk take.
std::vector<uint64_t> FewSizes() {
  return {0, 1, 3, 4, 7, 8, 9, 1023, 1024, 1025, 2047, 2048, 2049, 200001};
}

std::vector<uint64_t> ManySizes(int more) {
  std::vector<uint64_t> sizes = FewSizes();
  for (int i = 0; i < more; ++i) sizes.push_back(1 + generator() % 300);
  return sizes;
}

// A rule, or averages of `number` alone, and `targets` averages.
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

  std::string Name() const {
    return std::string(rule == nullptr ? "average" : rule->name) + " of " +
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

// No two alike; 1 for a flag.
std::vector<double> ScalarsOf(const RuleInfo& rule) {
  std::vector<double> scalars;
  std::istringstream names{std::string(rule.scalars)};
  for (std::string name; names >> name;) {
    scalars.push_back(name.back() == '?' ? 1 : 0.4 + 0.07 * scalars.size());
  }
  return scalars;
}

// Operands in double, without what lies between the variables.
using Doubles = std::vector<std::vector<double>>;

Doubles ReadDoubles(const Layout& layout,
                    const std::vector<std::unique_ptr<Operand>>& operands,
                    bool from_device) {
  Doubles result;
  for (const auto& operand : operands) {
    const std::vector<char> data =
        from_device ? operand->device.Read() : operand->host;
    result.emplace_back();
    for (size_t v = 0; v < layout.sizes.size(); ++v) {
      for (uint64_t i = 0; i < layout.sizes[v]; ++i) {
        result.back().push_back(
            Get(operand->number, data.data() + (layout.begins[v] + i) *
                                                   SizeOf(operand->number)));
      }
    }
  }
  return result;
}

// Whether numbers are what one of `wants` has, or between two of these.
bool IsNear(const Doubles& got, const std::vector<Doubles>& wants,
            const std::vector<std::unique_ptr<Operand>>& operands,
            const std::string& what) {
  bool right = true;
  for (size_t o = 0; o < operands.size(); ++o) {
    // An average is of what was stored.
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
      // Not a number is worst of all.
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
  for (int s = 0; s < c.sources; ++s) {
    add(s == 0 ? c.number : c.input, true);
    update.sources.push_back({0.3 + s, operands.back()->number});
  }
  for (int t = 0; t < c.targets; ++t) {
    add(c.average, true);
    update.targets.push_back({0.1 * (t + 1), c.average});
  }

  update.arrays = operands.size();
  update.elements = layout.sizes;
  for (size_t v = 0; v < layout.sizes.size(); ++v) {
    for (const auto& operand : operands) {
      update.addresses.push_back(operand->device.address() +
                                 layout.begins[v] * SizeOf(operand->number));
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

  // The same by the CPU, stage by stage, over one array of each operand.
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
      step(c.rule->id, state, input, {arrays.begin(), arrays.begin() + next},
           update.scalars);
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
  const Number sum = update.is_double ? Number::kDouble : Number::kFloat;
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
  // A rule may jump, as a sign does: where roundings before the jump decide to
  // which side, so do inputs that differ by some roundings.
  constexpr double kRoundings = 4;
  std::vector<Doubles> wants;
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

// Rows that have one, several and very many gradients.
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

size_t FreeMemory() {
  size_t free, total;
  Call("cuMemGetInfo_v2", &free, &total);
  return free;
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

int CheckHuge() {
  constexpr uint64_t kSpace = 4096;
  const auto bytes_of = [](uint64_t elements) { return 2 * elements + kSpace; };
  uint64_t elements = 0;
  for (const int log2 : {31, 32}) {
    const uint64_t more = (uint64_t{1} << log2) + 12345;
    if (FreeMemory() > 2 * bytes_of(more) + (size_t{1} << 30)) elements = more;
  }
  if (elements == 0) {
    std::printf("NOT CHECKED: there are not 10 GB of free memory\n");
    return 0;
  }
  const size_t bytes = bytes_of(elements);
  Array shadow(bytes), value(bytes);
  Call("cuMemsetD8_v2", shadow.address(), static_cast<unsigned char>(0), bytes);
  Call("cuMemsetD8_v2", value.address(), static_cast<unsigned char>(0x3c),
       bytes);
  Update update;
  update.sources = {{1, Number::kBfloat16}};
  update.targets = {{1, Number::kBfloat16}};
  update.arrays = 2;
  update.elements = {elements};
  update.addresses = {value.address(), shadow.address()};
  Run(update);
  Wait();
  const std::vector<char> got = shadow.Read();
  const uint64_t copied = std::count(got.begin(), got.end(), 0x3c);
  const bool right =
      copied == 2 * elements &&
      std::count(got.end() - kSpace, got.end(), 0) == kSpace;
  std::printf("%s: %llu of %llu bytes\n", right ? "right" : "WRONG",
              static_cast<unsigned long long>(copied),
              static_cast<unsigned long long>(2 * elements));
  return right ? 0 : 1;
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
    // More than a launch takes with small tables, once also with large ones.
    const auto many = ManySizes(number == Number::kFloat ? 3000 : 400);
    for (const RuleInfo& rule : kRules) {
      if (rule.inputs != "grad") continue;
      count(CheckStep({&rule, number, input, input, 0, 2, many}));
      count(CheckStep({&rule, number, input, number, 0, 0, FewSizes()}));
    }
    for (const int sources : {1, 3}) {
      count(CheckStep({nullptr, number, input, input, sources, 2, many}));
      count(CheckStep({nullptr, number, input, input, sources, 1,
                       FewSizes()}));
    }
    count(CheckSum(input, number == Number::kDouble));
  }
  const RuleInfo& adam = Info(RuleId::kAdam);
  Case captured = {&adam, Number::kFloat, Number::kFloat, Number::kFloat, 0, 2,
                   ManySizes(3000)};
  captured.is_captured = true;
  count(CheckStep(captured));
  // A variable that takes several launches.
  Case long_one = captured;
  long_one.chunk_log2 = 3;
  long_one.sizes = {5, (uint64_t{kMaxChunks} << 3) + 77, 9};
  count(CheckStep(long_one));
  count(CheckFar());
  std::printf("%d of %d right\n", checked - wrong, checked);
  return wrong == 0 ? 0 : 1;
}

// Seconds of functions that enqueue, by the GPU's own clock: medians of turns
// that alternate.
std::vector<double> Seconds(const std::vector<std::function<void()>>& works) {
  void *begin, *end;
  Call("cuEventCreate", &begin, 0u);
  Call("cuEventCreate", &end, 0u);
  constexpr int kWarmUp = 3, kTurns = 21;
  std::vector<std::vector<float>> times(works.size());
  for (int turn = 0; turn < kWarmUp + kTurns; ++turn) {
    for (size_t w = 0; w < works.size(); ++w) {
      Call("cuEventRecord", begin, stream);
      works[w]();
      Call("cuEventRecord", end, stream);
      Call("cuEventSynchronize", end);
      float milliseconds;
      Call("cuEventElapsedTime", &milliseconds, begin, end);
      if (turn >= kWarmUp) times[w].push_back(milliseconds);
    }
  }
  Call("cuEventDestroy_v2", begin);
  Call("cuEventDestroy_v2", end);
  std::vector<double> medians;
  for (std::vector<float>& of_one : times) {
    std::nth_element(of_one.begin(), of_one.begin() + kTurns / 2, of_one.end());
    medians.push_back(of_one[kTurns / 2] / 1000);
  }
  return medians;
}

// ResNet-50's variables: of each convolution its kernel and the two of its
// batch normalization, and the last layer.
std::vector<uint64_t> ResNet50() {
  std::vector<uint64_t> sizes = {7 * 7 * 3 * 64, 64, 64};
  auto convolution = [&](uint64_t width, uint64_t in, uint64_t out) {
    sizes.insert(sizes.end(), {width * width * in * out, out, out});
  };
  uint64_t in = 64;
  for (const auto& [blocks, width] :
       {std::pair<int, uint64_t>(3, 64), {4, 128}, {6, 256}, {3, 512}}) {
    for (int block = 0; block < blocks; ++block) {
      convolution(1, in, width);
      convolution(3, width, width);
      convolution(1, width, 4 * width);
      if (block == 0) convolution(1, in, 4 * width);
      in = 4 * width;
    }
  }
  sizes.insert(sizes.end(), {2048 * 1000, 1000});
  return sizes;
}

// An update and its average, over arrays in one buffer.
class Work {
 public:
  Work(const std::string& sizes_name, const RuleInfo* rule, Number number,
       std::vector<uint64_t> sizes, uint64_t divisor)
      : arrays_(rule == nullptr ? 2 : CountNames(rule->states) + 2),
        name_((rule == nullptr ? "EMA" : std::string(rule->name) + ", EMA")) {
    name_.resize(16, ' ');
    name_ += " " + sizes_name;
    name_.resize(31, ' ');
    name_ += NameOf(number);
    name_.resize(40, ' ');
    const auto padded = [](uint64_t size) { return (size + 127) / 128 * 128; };
    uint64_t total = 0;
    for (uint64_t& size : sizes) {
      size = (size - 1) / divisor + 1;
      total += padded(size);
      elements_ += size;
    }
    const size_t bytes = SizeOf(number);
    buffer_ = std::make_unique<Array>(total * bytes * arrays_);
    Call("cuMemsetD8_v2", buffer_->address(), static_cast<unsigned char>(0x3c),
         total * bytes * arrays_);
    half_ = total * bytes * arrays_ / 2;
    moved_ = static_cast<double>(elements_) * bytes * (2 * arrays_ - 1);
    update_.is_double = number == Number::kDouble;
    update_.state = update_.input = number;
    update_.arrays = arrays_;
    update_.elements = sizes;
    if (rule == nullptr) {
      update_.sources = {{1, number}};
    } else {
      update_.rule = rule->id;
      update_.scalars = ScalarsOf(*rule);
    }
    update_.targets = {{0.1, number}};
    uint64_t begin = 0;
    for (const uint64_t size : sizes) {
      for (size_t a = 0; a < arrays_; ++a) {
        update_.addresses.push_back(buffer_->address() +
                                    (a * total + begin) * bytes);
      }
      begin += padded(size);
    }
  }

  void set_chunk_log2(int log2) { update_.chunk_log2 = log2; }
  void Enqueue() const { Run(update_); }

  // A copy from one half of the buffer to the other.
  void EnqueueCopy() const {
    Call("cuMemcpyDtoDAsync_v2", buffer_->address() + half_,
         buffer_->address(), half_, stream);
  }

  const std::string& name() const { return name_; }
  size_t variables() const { return update_.elements.size(); }
  size_t launches() const { return Graph(update_).launches(); }
  // Bytes. Each array is read, and all are written but the gradient or the
  // value.
  double moved() const { return moved_; }
  double copied() const { return 2.0 * half_; }

 private:
  const size_t arrays_;
  std::string name_;
  uint64_t elements_ = 0;
  std::unique_ptr<Array> buffer_;
  uint64_t half_;
  double moved_;
  Update update_;
};

using Sizes = std::pair<std::string, std::vector<uint64_t>>;

// One variable of 1 GiB, or less where the memory would not do for all arrays.
Sizes OneLarge(Number number) {
  const uint64_t mib = std::min<uint64_t>(1024, FreeMemory() / 8 >> 20);
  return {"one, " + std::to_string(mib) + " MiB",
          {(mib << 20) / SizeOf(number)}};
}

// `divisor` makes all arrays smaller.
int MeasureBandwidth(uint64_t divisor) {
  std::vector<uint64_t> tiny;
  for (int i = 0; i < 4000; ++i) tiny.push_back(64 + generator() % 4000);
  for (const Number number : {Number::kFloat, Number::kBfloat16,
                              Number::kHalf, Number::kDouble}) {
    for (const Sizes& sizes : {OneLarge(number), Sizes("ResNet-50", ResNet50()),
                               Sizes("4000 small", tiny)}) {
      for (const RuleInfo* rule :
           {static_cast<const RuleInfo*>(nullptr), &Info(RuleId::kMomentum),
            &Info(RuleId::kAdam)}) {
        const Work work(sizes.first, rule, number, sizes.second, divisor);
        const std::vector<double> seconds = Seconds(
            {[&] { work.Enqueue(); }, [&] { work.EnqueueCopy(); }});
        const double speed = work.moved() / seconds[0];
        const double copy = work.copied() / seconds[1];
        std::printf("%s %9.2f MB moved %9.4f ms %7.0f GB/s, %5.1f %% of a "
                    "copy's %.0f GB/s, %zu launches for %zu variables\n",
                    work.name().c_str(), work.moved() / 1e6, seconds[0] * 1e3,
                    speed / 1e9, 100 * speed / copy, copy / 1e9,
                    work.launches(), work.variables());
        std::fflush(stdout);
      }
    }
  }
  return 0;
}

int MeasureChunks(uint64_t divisor) {
  for (const Number number : {Number::kFloat, Number::kBfloat16}) {
    for (const Sizes& sizes :
         {OneLarge(number), Sizes("ResNet-50", ResNet50())}) {
      for (const RuleInfo* rule :
           {static_cast<const RuleInfo*>(nullptr), &Info(RuleId::kAdam)}) {
        Work work(sizes.first, rule, number, sizes.second, divisor);
        // 0 is the launcher's own choice.
        std::vector<int> log2s = {0};
        std::vector<std::function<void()>> works;
        for (int k = kMinChunkLog2; k <= kMaxChunkLog2; ++k) log2s.push_back(k);
        for (const int log2 : log2s) {
          works.push_back([&work, log2] {
            work.set_chunk_log2(log2);
            work.Enqueue();
          });
        }
        const std::vector<double> seconds = Seconds(works);
        std::printf("%s", work.name().c_str());
        for (size_t i = 0; i < log2s.size(); ++i) {
          const std::string log2 =
              i == 0 ? "chosen" : "2^" + std::to_string(log2s[i]);
          std::printf(" %s %.0f", log2.c_str(),
                      work.moved() / seconds[i] / 1e9);
        }
        std::printf(" GB/s\n");
        std::fflush(stdout);
      }
    }
  }
  return 0;
}

int Main(int argc, char** argv) {
  std::vector<DeviceInfo> devices;
  const std::string error = Describe(&devices);
  if (!error.empty()) Fail(error);
  if (devices.empty()) Fail("there is no GPU");
  const DeviceInfo& info = devices[0];
  std::printf("%s, compute capability %d.%d, driver for CUDA %d.%d\n",
              info.name.c_str(), info.compute_capability / 10,
              info.compute_capability % 10, info.driver / 1000,
              info.driver % 1000 / 10);
  Device device;
  Context context;
  Call("cuDeviceGet", &device, 0);
  Call("cuDevicePrimaryCtxRetain", &context, device);
  Call("cuCtxSetCurrent", context);
  constexpr unsigned kNonBlocking = 1;
  Call("cuStreamCreate", &stream, kNonBlocking);
  const std::string command = argc > 1 ? argv[1] : "";
  const uint64_t divisor = argc > 2 ? std::max(1ll, std::atoll(argv[2])) : 1;
  if (command == "numbers") return CheckNumbers();
  if (command == "huge") return CheckHuge();
  if (command == "bandwidth") return MeasureBandwidth(divisor);
  if (command == "chunks") return MeasureChunks(divisor);
  Fail("usage: check numbers | huge | bandwidth [divisor] | chunks [divisor]");
  return 2;
}

}  // namespace
}  // namespace gpu
}  // namespace wrapopt

int main(int argc, char** argv) { return wrapopt::gpu::Main(argc, argv); }
