// The GPU kernels without TensorFlow: `check numbers` compares them with the
// CPU's, bit for bit; `check bandwidth` measures them beside a copy.
//
// Needs a driver and a GPU, or the tests' fake one.
#include <dlfcn.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "cc/gpu/driver.h"
#include "cc/gpu/images.h"
#include "cc/gpu/launcher.h"
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

template <class Work>
void Run(const Work& work) {
  const std::string error = Enqueue(work, stream);
  if (!error.empty()) Fail(error);
}

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

std::vector<uint64_t> ManySizes() {
  std::vector<uint64_t> sizes = {0, 1, 3, 4, 7, 8, 9, 2047, 2048, 2049, 200001};
  for (int i = 0; i < 1000; ++i) sizes.push_back(1 + generator() % 300);
  return sizes;
}

// A rule, or averages of `number` alone, and `targets` averages.
bool CheckStep(const RuleInfo* rule, Number number, Number input,
               Number average, int sources, int targets) {
  Isa isa;
  std::string error;
  if (!ChosenIsa(&isa, &error)) Fail(error);
  const Layout layout(ManySizes());
  const size_t states = rule == nullptr ? 0 : CountNames(rule->states);
  const size_t inputs = rule == nullptr ? 0 : CountNames(rule->inputs);
  Update update;
  update.is_double = number == Number::kDouble;
  update.state = number;
  update.input = input;
  std::vector<Operand*> operands;
  std::string what = rule == nullptr ? "average" : rule->name;
  for (size_t s = 0; s < states; ++s) {
    operands.push_back(new Operand(layout, number, /*has_signs=*/s == 0));
  }
  for (size_t i = 0; i < inputs; ++i) {
    operands.push_back(new Operand(layout, input, true));
  }
  if (rule != nullptr) {
    update.rule = rule->id;
    for (size_t c = 0; c < CountNames(rule->scalars); ++c) {
      update.scalars.push_back(0.125 * (c + 1));
    }
  }
  for (int s = 0; s < sources; ++s) {
    operands.push_back(new Operand(layout, s == 0 ? number : input, true));
    update.sources.push_back({0.3 + s, operands.back()->number});
  }
  for (int t = 0; t < targets; ++t) {
    operands.push_back(new Operand(layout, average, true));
    update.targets.push_back({0.1 * (t + 1), average});
  }
  what += std::string(" of ") + NameOf(number) + " and " + NameOf(input) +
          ", " + std::to_string(sources) + " sources, " +
          std::to_string(targets) + " averages in " + NameOf(average);

  update.arrays = operands.size();
  update.elements = layout.sizes;
  for (size_t v = 0; v < layout.sizes.size(); ++v) {
    for (const Operand* operand : operands) {
      update.addresses.push_back(operand->device.address() +
                                 layout.begins[v] * SizeOf(operand->number));
    }
  }
  Run(update);
  Wait();

  // The same by the CPU, stage by stage.
  const Number sum = update.is_double ? Number::kDouble : Number::kFloat;
  for (size_t v = 0; v < layout.sizes.size(); ++v) {
    const size_t size = layout.sizes[v];
    auto data = [&](Operand& operand) {
      return static_cast<void*>(operand.host.data() +
                                layout.begins[v] * SizeOf(operand.number));
    };
    auto step = [&](RuleId id, Number state, Number input,
                    const std::vector<void*>& arrays,
                    const std::vector<double>& scalars) {
      FindStep(id, state, input, isa).loop(arrays.data(), scalars.data(), 0,
                                           size, Ahead());
    };
    std::vector<char> scratch(size * SizeOf(sum));
    void* value = scratch.data();
    Number value_number = sum;
    size_t next = 0;
    if (rule != nullptr) {
      std::vector<void*> arrays;
      for (; next < states + inputs; ++next) {
        arrays.push_back(data(*operands[next]));
      }
      step(rule->id, number, input, arrays, update.scalars);
      value = arrays[0];
      value_number = number;
    }
    for (int s = 0; s < sources; ++s, ++next) {
      step(RuleId::kWeightedSum, sum, operands[next]->number,
           {value, data(*operands[next])},
           {update.sources[s].scalar, s == 0 ? 1.0 : 0.0});
    }
    for (int t = 0; t < targets; ++t, ++next) {
      step(RuleId::kEma, average, value_number, {data(*operands[next]), value},
           {update.targets[t].scalar});
    }
  }
  bool right = true;
  for (size_t i = 0; i < operands.size(); ++i) {
    right &= IsEqual(*operands[i], what + ", array " + std::to_string(i));
    delete operands[i];
  }
  return right;
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
      Isa isa;
      std::string error;
      if (!ChosenIsa(&isa, &error)) Fail(error);
      FindStep(RuleId::kWeightedSum, sum_number, number, isa)
          .loop(arrays, scalars, 0, kElements, Ahead());
    }
  }
  return IsEqual(sums, std::string("sums of rows of ") + NameOf(number)) &&
         IsEqual(grads, "gradients");
}

// An average of more elements than 31 bits count; of nothing where there is no
// memory for it.
bool CheckHuge() {
  size_t free, total;
  Call("cuMemGetInfo_v2", &free, &total);
  constexpr uint64_t kElements = (uint64_t{1} << 32) + 12345;
  constexpr uint64_t kSpace = 4096;
  if (free < 2 * (2 * kElements + kSpace) + (uint64_t{1} << 30)) {
    std::printf("no memory for 2^32 elements: not checked\n");
    return true;
  }
  const size_t bytes = 2 * kElements + kSpace;
  Array shadow(bytes), value(bytes);
  Call("cuMemsetD8_v2", shadow.address(), static_cast<unsigned char>(0), bytes);
  Call("cuMemsetD8_v2", value.address(), static_cast<unsigned char>(0x3c),
       bytes);
  Update update;
  update.sources = {{1, Number::kBfloat16}};
  update.targets = {{1, Number::kBfloat16}};
  update.arrays = 2;
  update.elements = {kElements};
  update.addresses = {value.address(), shadow.address()};
  Run(update);
  Wait();
  const std::vector<char> got = shadow.Read();
  const uint64_t copied = std::count(got.begin(), got.end(), 0x3c);
  const bool right =
      copied == 2 * kElements &&
      std::count(got.end() - kSpace, got.end(), 0) == kSpace;
  if (!right) {
    std::printf("  WRONG: %llu of %llu bytes of 2^32 elements\n",
                static_cast<unsigned long long>(copied),
                static_cast<unsigned long long>(2 * kElements));
  }
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
    for (const RuleInfo& rule : kRules) {
      if (rule.inputs != "grad") continue;
      count(CheckStep(&rule, number, input, input, 0, 2));
      count(CheckStep(&rule, number, input, number, 0, 0));
    }
    for (const int sources : {1, 3}) {
      count(CheckStep(nullptr, number, input, input, sources, 2));
    }
    count(CheckSum(input, number == Number::kDouble));
  }
  count(CheckHuge());
  std::printf("%d of %d right\n", checked - wrong, checked);
  return wrong == 0 ? 0 : 1;
}

// Seconds of a function that enqueues, by the GPU's own clock: the median.
template <class Work>
double Seconds(const Work& work) {
  using Event = void*;
  Event begin, end;
  Call("cuEventCreate", &begin, 0u);
  Call("cuEventCreate", &end, 0u);
  std::vector<float> times;
  for (int i = 0; i < 23; ++i) {
    Call("cuEventRecord", begin, stream);
    work();
    Call("cuEventRecord", end, stream);
    Call("cuEventSynchronize", end);
    float milliseconds;
    Call("cuEventElapsedTime", &milliseconds, begin, end);
    if (i >= 3) times.push_back(milliseconds);
  }
  Call("cuEventDestroy_v2", begin);
  Call("cuEventDestroy_v2", end);
  std::nth_element(times.begin(), times.begin() + times.size() / 2,
                   times.end());
  return times[times.size() / 2] / 1000;
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

void Measure(const char* name, const RuleInfo* rule, Number number,
             std::vector<uint64_t> sizes, uint64_t divisor) {
  for (uint64_t& size : sizes) size = (size - 1) / divisor + 1;
  Update update;
  uint64_t total = 0;
  for (const uint64_t size : sizes) total += (size + 127) / 128 * 128;
  const size_t bytes = SizeOf(number);
  const size_t arrays = rule == nullptr ? 2 : CountNames(rule->states) + 2;
  Array buffer(total * bytes * arrays);
  Call("cuMemsetD8_v2", buffer.address(), static_cast<unsigned char>(0),
       total * bytes * arrays);
  update.is_double = number == Number::kDouble;
  update.state = update.input = number;
  update.arrays = arrays;
  update.elements = sizes;
  if (rule == nullptr) {
    update.sources = {{1, number}};
  } else {
    update.rule = rule->id;
    update.scalars.assign(CountNames(rule->scalars), 0.5);
  }
  update.targets = {{0.1, number}};
  uint64_t begin = 0, elements = 0;
  for (const uint64_t size : sizes) {
    for (size_t a = 0; a < arrays; ++a) {
      update.addresses.push_back(buffer.address() +
                                 (a * total + begin) * bytes);
    }
    begin += (size + 127) / 128 * 128;
    elements += size;
  }
  // Each is read, and all are written but the gradient or the value.
  const double moved = static_cast<double>(elements) * bytes * (2 * arrays - 1);
  const double seconds = Seconds([&] { Run(update); });
  const uint64_t half = total * bytes * arrays / 2;
  const double copy = Seconds([&] {
    Call("cuMemcpyDtoDAsync_v2", buffer.address() + half, buffer.address(),
         half, stream);
  });
  const std::string what =
      rule == nullptr ? "EMA" : std::string(rule->name) + ", EMA";
  std::printf("%-16s %-12s %-8s %9.2f MB moved %9.4f ms %7.0f GB/s, "
              "%5.1f %% of a copy's %.0f GB/s\n",
              what.c_str(),
              name, NameOf(number), moved / 1e6, seconds * 1e3,
              moved / seconds / 1e9, 100 * moved / seconds / (2 * half / copy),
              2 * half / copy / 1e9);
  std::fflush(stdout);
}

// With arrays of a GiB, and others: `divisor` makes all of them smaller.
int MeasureBandwidth(uint64_t divisor) {
  const RuleInfo& adam = Info(RuleId::kAdam);
  const RuleInfo& momentum = Info(RuleId::kMomentum);
  std::vector<uint64_t> tiny;
  for (int i = 0; i < 4000; ++i) tiny.push_back(64 + generator() % 4000);
  for (const Number number : {Number::kFloat, Number::kBfloat16,
                              Number::kHalf, Number::kDouble}) {
    const std::vector<uint64_t> one = {(uint64_t{1} << 30) / SizeOf(number)};
    for (const auto& [name, sizes] :
         {std::pair("one of 1 GiB", one), {"ResNet-50", ResNet50()},
          {"4000 small", tiny}}) {
      Measure(name, nullptr, number, sizes, divisor);
      Measure(name, &momentum, number, sizes, divisor);
      Measure(name, &adam, number, sizes, divisor);
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
  if (command == "numbers") return CheckNumbers();
  if (command == "bandwidth") {
    return MeasureBandwidth(argc > 2 ? std::max(1ll, std::atoll(argv[2])) : 1);
  }
  Fail("usage: check numbers | check bandwidth [divisor]");
  return 2;
}

}  // namespace
}  // namespace gpu
}  // namespace wrapopt

int main(int argc, char** argv) { return wrapopt::gpu::Main(argc, argv); }
