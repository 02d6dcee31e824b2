// The GPU's tables and launches, on the driver of the fake GPU, which runs the
// source of the kernels.
#include "cc/gpu/launcher.h"

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cc/gpu/images.h"
#include "cc/gpu/table.h"
#include "cc/rules/catch_up.h"
#include "tests/cc/arrays.h"
#include "tests/cc/reference.h"

// An image for the fake driver, which only looks for names of kernels in it.
#define NAMES(name) \
  "wrapopt_small_" name "_float wrapopt_small_" name "_double " \
  "wrapopt_large_" name "_float wrapopt_large_" name "_double "
#define NAMES_OF_STEP(name) \
  NAMES(name) "wrapopt_program_" name "_float wrapopt_program_" name "_double "
#define NAMES_OF_RULE(name, states, inputs, scalars, sparse) \
  NAMES_OF_STEP(#name)
constexpr char kNames[] =
    NAMES_OF_STEP("Average") NAMES("CatchUp") NAMES("Sum") NAMES("Mark")
        WRAPOPT_UPDATES(NAMES_OF_RULE);

namespace wrapopt {
namespace gpu {

const std::string& CompressedNames() {
  static const auto* const compressed = [] {
    void* library = dlopen("liblzma.so.5", RTLD_NOW);
    const auto encode = reinterpret_cast<int (*)(
        uint32_t preset, int check, const void* allocator, const char* in,
        size_t in_size, char* out, size_t* out_at, size_t out_size)>(
        dlsym(library, "lzma_easy_buffer_encode"));
    auto* const out = new std::string(2 * sizeof(kNames), '\0');
    size_t size = 0;
    encode(6, 4, nullptr, kNames, sizeof(kNames), out->data(), &size,
           out->size());
    out->resize(size);
    return out;
  }();
  return *compressed;
}

const std::vector<Image>& Images() {
  static const auto* const images = [] {
    const auto image = [](bool is_ptx, int compute_capability, Kind kind) {
      const std::string& xz = CompressedNames();
      return Image{is_ptx,    compute_capability, kind, xz.data(),
                   xz.size(), sizeof(kNames)};
    };
    return new std::vector<Image>{
        image(true, 60, Kind::kSmall),       image(true, 70, Kind::kLarge),
        image(false, 80, Kind::kLarge),      image(false, 86, Kind::kLarge),
        image(true, 70, Kind::kProgram),
    };
  }();
  return *images;
}

namespace {

// The functions of the driver that TensorFlow calls.
struct FakeGpu {
  FakeGpu() {
    // driver.cc then finds this library by its name.
    library = dlopen("tests/fake_gpu/libcuda.so.1", RTLD_NOW);
    if (library == nullptr) {
      ADD_FAILURE() << dlerror();
      abort();
    }
  }

  template <class... Args>
  void Call(const char* name, Args... args) const {
    const auto function = reinterpret_cast<int (*)(Args...)>(
        dlsym(library, name));
    ASSERT_NE(function, nullptr) << name;
    ASSERT_EQ(function(args...), 0) << name;
  }

  // A context has the tables of the GPU that there is when it is first used.
  void UseContext(const char* compute_capability) const {
    setenv("WRAPOPT_FAKE_GPU_CC", compute_capability, 1);
    Call("cuCtxSetCurrent", const_cast<char*>(compute_capability));
  }

  static const FakeGpu& Get() {
    static const auto* const gpu = new FakeGpu();
    return *gpu;
  }

  void* library;
};

// A copy of an array on the device.
class OnDevice {
 public:
  explicit OnDevice(const Array& array)
      : array_(array), offset_(reinterpret_cast<uintptr_t>(array.data()) % 64) {
    FakeGpu::Get().Call("cuMemAlloc_v2", &memory_,
                        size_t{offset_ + array.bytes()});
    FakeGpu::Get().Call("cuMemcpyHtoD_v2", address(),
                        static_cast<const void*>(array.data()), array.bytes());
  }
  OnDevice(OnDevice&& from)
      : array_(from.array_),
        offset_(from.offset_),
        memory_(std::exchange(from.memory_, 0)) {}
  ~OnDevice() {
    if (memory_ != 0) FakeGpu::Get().Call("cuMemFree_v2", memory_);
  }

  uint64_t address() const { return memory_ + offset_; }
  Array Read() const {
    const Array array = array_;
    FakeGpu::Get().Call("cuMemcpyDtoH_v2", static_cast<void*>(array.data()),
                        address(), array.bytes());
    return array;
  }

 private:
  const Array array_;
  const size_t offset_;
  uint64_t memory_ = 0;
};

TEST(Table, Places) {
  for (const uint32_t first : {0u, 1u, 4095u, 65535u}) {
    for (const uint32_t last : {1u, 2u, 1000u, 32768u}) {
      for (const bool aligned : {false, true}) {
        const uint32_t place = Place(first, last, aligned);
        EXPECT_EQ(FirstChunk(place), first);
        EXPECT_EQ(LastElements(place), last);
        EXPECT_EQ(IsAligned(place), aligned);
      }
    }
  }
  for (const size_t begin : {0, 1, 65535}) {
    for (const size_t end : {0, 1, 65535}) {
      for (const bool last : {false, true}) {
        const Word marked = Marked(begin, end, last);
        EXPECT_EQ(FirstMarked(marked), begin);
        EXPECT_EQ(EndMarked(marked), end);
        EXPECT_EQ(IsLastMarked(marked), last);
      }
    }
  }
  EXPECT_LE(sizeof(SmallTable), 4096u);
  EXPECT_LE(sizeof(LargeTable), 32764u);
  EXPECT_LE(sizeof(LargeSumTable), 32764u);
  EXPECT_LE(sizeof(LargeMarkTable), 32764u);
}

TEST(Images, AreExpandedWhole) {
  Image image = Images().front();
  std::string expanded;
  EXPECT_EQ(Expand(image, &expanded), "");
  EXPECT_EQ(expanded, std::string(kNames, sizeof(kNames)));
  --image.xz_bytes;  // The end is missing.
  EXPECT_EQ(Expand(image, &expanded),
            "liblzma.so.5 could not expand the image compute_60 of the GPU "
            "kernels (error 10)");
  ++image.xz_bytes;
  ++image.bytes;  // More than there is.
  EXPECT_NE(Expand(image, &expanded), "");
}

TEST(Images, AreChosenForTheGpu) {
  const auto name = [](int compute_capability, int driver, Kind kind) {
    const Image* image = ChooseImage({"", compute_capability, 1, driver}, kind);
    return image == nullptr ? "none" : NameOf(*image);
  };
  EXPECT_EQ(name(50, 12080, Kind::kSmall), "none");
  EXPECT_EQ(name(60, 12080, Kind::kSmall), "compute_60");
  EXPECT_EQ(name(60, 12080, Kind::kLarge), "none");
  EXPECT_EQ(name(70, 12000, Kind::kLarge), "none");
  EXPECT_EQ(name(75, 12010, Kind::kLarge), "compute_70 large");
  EXPECT_EQ(name(80, 12010, Kind::kLarge), "sm_80 large");
  EXPECT_EQ(name(89, 12010, Kind::kLarge), "sm_86 large");
  EXPECT_EQ(name(90, 12010, Kind::kLarge), "compute_70 large");
  EXPECT_EQ(name(70, 12000, Kind::kProgram), "none");
  EXPECT_EQ(name(70, 12010, Kind::kProgram), "compute_70 program");
}

// Where the numbers of an update are: in the launch's table, or in device
// memory, beside whether the step is accepted.
enum class NumbersAre { kInTable, kAccepted, kRefused };

// Its compute capability: 6.0 has only small tables.
class Launches : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override { FakeGpu::Get().UseContext(GetParam()); }

  static bool HasLargeTables() { return GetParam() != std::string("60"); }

  // A program's tables are large.
  static std::vector<NumbersAre> AllNumbersAre() {
    if (!HasLargeTables()) return {NumbersAre::kInTable};
    return {NumbersAre::kInTable, NumbersAre::kAccepted, NumbersAre::kRefused};
  }
};

INSTANTIATE_TEST_SUITE_P(Gpus, Launches, testing::Values("60", "90"),
                         [](const auto& info) {
                           return std::string("Cc") + info.param;
                         });

// An update's arrays, and what is to become of them.
struct Arrays {
  void Add(Update* update, size_t elements, const std::vector<Number>& numbers,
           Random* random, size_t offset) {
    update->elements.push_back(elements);
    update->arrays = numbers.size();
    for (const Number number : numbers) {
      this->numbers.push_back(number);
      want.push_back(Numbers(elements, number, random, offset));
      got.emplace_back(want.back());
      update->addresses.push_back(got.back().address());
    }
  }

  void Check() const {
    for (size_t a = 0; a < got.size(); ++a) {
      ExpectSame(got[a].Read(), want[a], numbers[a],
                 "array " + std::to_string(a));
    }
  }

  std::vector<Number> numbers;
  std::vector<Array> want;
  std::vector<OnDevice> got;
};

// Moves an update's numbers to device memory, if they are to be there.
class NumbersOnDevice {
 public:
  NumbersOnDevice(NumbersAre are, Update* update) {
    if (are == NumbersAre::kInTable) return;
    std::vector<double> numbers;
    const auto take = [&numbers](double* number) {
      numbers.push_back(*number);
      *number = -1;  // Nobody may read it.
    };
    for (double& scalar : update->scalars) take(&scalar);
    for (Update::Operand& source : update->sources) take(&source.scalar);
    for (Update::Operand& target : update->targets) take(&target.scalar);
    const Array accept(sizeof(bool));
    *accept.as<bool>() = are == NumbersAre::kAccepted;
    const Array array(numbers.size() * sizeof(double));
    std::memcpy(array.data(), numbers.data(), array.bytes());
    accept_ = std::make_unique<OnDevice>(accept);
    numbers_ = std::make_unique<OnDevice>(array);
    update->accept = accept_->address();
    update->numbers = numbers_->address();
  }

 private:
  std::unique_ptr<OnDevice> accept_, numbers_;
};

// Takes the step of a rule, of which an average is kept.
void Step(const RuleInfo& rule, Number state, Number input, int chunk_log2,
          const std::vector<size_t>& sizes, Random* random,
          NumbersAre are = NumbersAre::kInTable) {
  Update update;
  update.rule = rule.id;
  update.state = state;
  update.input = input;
  update.scalars = ScalarsOf(rule, chunk_log2 > 0);
  update.is_double = state == Number::kDouble;
  update.chunk_log2 = chunk_log2;
  const Number average = update.is_double ? Number::kDouble : Number::kFloat;
  update.targets = {{0.25, average}};
  std::vector<Number> numbers(CountNames(rule.states), state);
  numbers.resize(numbers.size() + CountNames(rule.inputs), input);
  numbers.push_back(average);
  Arrays arrays;
  for (const size_t size : sizes) {
    arrays.Add(&update, size, numbers, random, size % 3);
  }
  Update on_device = update;
  const NumbersOnDevice numbers_on_device(are, &on_device);
  ASSERT_EQ(Enqueue(on_device, nullptr), "");
  for (size_t v = 0; are != NumbersAre::kRefused && v < sizes.size(); ++v) {
    const Array* const all = &arrays.want[v * numbers.size()];
    std::vector<void*> operands;
    for (size_t a = 0; a + 1 < numbers.size(); ++a) {
      operands.push_back(all[a].data());
    }
    Reference(rule.id, state, input, operands.data(), update.scalars.data(),
              sizes[v]);
    void* const ema[] = {all[numbers.size() - 1].data(), all[0].data()};
    Reference(RuleId::kEma, average, state, ema, &update.targets[0].scalar,
              sizes[v]);
  }
  arrays.Check();
}

TEST_P(Launches, TakeTheStepOfEachRule) {
  Random random(21);
  for (const RuleInfo& rule : kRules) {
    if (rule.inputs != "grad") continue;
    for (const auto& [state, input] : kPairs) {
      for (const NumbersAre are : AllNumbersAre()) {
        Step(rule, state, input, 0, {1, 0, 7, 2049, 16}, &random, are);
        Step(rule, state, input, 3, {0, 8, 100, 15}, &random, are);
      }
    }
  }
}

// More variables than a table holds, and more chunks than a launch.
TEST_P(Launches, AreSeveral) {
  Random random(22);
  const RuleInfo& rule = Info(RuleId::kMomentum);
  std::vector<size_t> sizes(2500, 3);
  sizes[7] = 0;
  for (const NumbersAre are : AllNumbersAre()) {
    Step(rule, Number::kFloat, Number::kFloat, 0, sizes, &random, are);
  }
  Step(rule, Number::kFloat, Number::kHalf, 3,
       {8 * kMaxChunks - 16, 8, 100, 1}, &random);
}

void AverageSources(NumbersAre are) {
  Random random(23);
  const Number number = Number::kFloat;
  Update update;
  update.sources = {{0.25, number}, {0.5, Number::kBfloat16}};
  update.targets = {{0.5, number}, {0.125, number}};
  Arrays arrays;
  const std::vector<size_t> sizes = {3000, 1, 0, 17};
  for (const size_t size : sizes) {
    arrays.Add(&update, size, {number, Number::kBfloat16, number, number},
               &random, 0);
  }
  Update on_device = update;
  const NumbersOnDevice numbers(are, &on_device);
  ASSERT_EQ(Enqueue(on_device, nullptr), "");
  for (size_t v = 0; are != NumbersAre::kRefused && v < sizes.size(); ++v) {
    const Array* const all = &arrays.want[4 * v];
    const Array sum(sizes[v] * SizeOf(number));
    for (int source = 0; source < 2; ++source) {
      const double scalars[] = {update.sources[source].scalar,
                                source == 0 ? 1. : 0.};
      void* const operands[] = {sum.data(), all[source].data()};
      Reference(RuleId::kWeightedSum, number, update.sources[source].number,
                operands, scalars, sizes[v]);
    }
    for (int target = 0; target < 2; ++target) {
      void* const operands[] = {all[2 + target].data(), sum.data()};
      Reference(RuleId::kEma, number, number, operands,
                &update.targets[target].scalar, sizes[v]);
    }
  }
  arrays.Check();
}

TEST_P(Launches, AverageSources) {
  for (const NumbersAre are : AllNumbersAre()) AverageSources(are);
}

// A program's launches may be captured: here, loading a kernel is an error.
TEST_P(Launches, LoadNothingThatIsLoaded) {
  if (!HasLargeTables()) return;
  // A context of its own, without the kernels that other tests have loaded.
  FakeGpu::Get().UseContext(strdup(GetParam()));
  Random random(27);
  for (const bool is_rule : {true, false}) {
    for (const size_t variables : {1, 3000}) {  // One launch, and two.
      Update update;
      Arrays arrays;
      if (is_rule) {
        update.rule = RuleId::kGradientDescent;
        update.scalars = {0.5};
      } else {
        update.sources = {{1, Number::kFloat}};
        update.targets = {{0.5, Number::kFloat}};
      }
      for (size_t v = 0; v < variables; ++v) {
        arrays.Add(&update, 1, {Number::kFloat, Number::kFloat}, &random, 0);
      }
      const NumbersOnDevice numbers(NumbersAre::kAccepted, &update);
      if (variables == 1) {
        ASSERT_EQ(LoadForProgram(update), "");
      }
      void* graph = nullptr;
      FakeGpu::Get().Call("cuStreamBeginCapture_v2",
                          static_cast<void*>(nullptr), 0);
      EXPECT_EQ(Enqueue(update, nullptr), "");
      FakeGpu::Get().Call("cuStreamEndCapture", static_cast<void*>(nullptr),
                          &graph);
      FakeGpu::Get().Call("cuGraphDestroy", graph);
    }
  }
}

TEST_P(Launches, CatchUpRows) {
  Random random(24);
  const Number number = Number::kFloat;
  for (const uint64_t row : {1, 3, 8, 64}) {
    const uint64_t rows = 700;
    const Array value = Numbers(rows * row, number, &random);
    const Array want = Numbers(rows * row, number, &random);
    const Array logs((rows + 1) * sizeof(double));
    for (uint64_t r = 0; r <= rows; ++r) {
      logs.as<double>()[r] = r == rows ? -2 : -0.25 * (r % 5);
    }
    const OnDevice values(value), shadow(want), log_decays(logs);
    Update update;
    update.sources = {{1, number}};
    update.targets = {{0, number}};
    update.is_step = false;
    update.elements = {rows * row};
    update.row_elements = {row};
    update.arrays = 4;
    update.addresses = {values.address(), shadow.address(),
                        log_decays.address(),
                        log_decays.address() + rows * sizeof(double)};
    ASSERT_EQ(Enqueue(update, nullptr), "");
    for (uint64_t r = 0; r < rows; ++r) {
      const double by = CatchUp::Rate(-2 - logs.as<double>()[r]);
      void* const operands[] = {want.as<float>() + r * row,
                                value.as<float>() + r * row};
      Reference(RuleId::kEma, number, number, operands, &by, row);
    }
    ExpectSame(shadow.Read(), want, number, "shadow");
  }
}

// Runs of gradients that do not fit into one table continue in the next.
TEST_P(Launches, SumRows) {
  Random random(25);
  for (const uint64_t row : {1, 5, 300}) {
    const Array grads = Numbers(500 * row, Number::kHalf, &random);
    // At the end of a table, each number of words is left.
    std::vector<size_t> counts = {1, 5000, 0, 600};
    for (int i = 0; i < 3000; ++i) counts.push_back(Below(4, &random));
    const Array want(counts.size() * row * sizeof(float));
    std::memset(want.data(), 0, want.bytes());
    const OnDevice from(grads), to(want);
    RowSum sum{from.address(), Number::kHalf, to.address(), false, row, {}};
    for (const size_t count : counts) {
      const uint64_t r = sum.runs.size();
      sum.runs.push_back({r, {}});
      for (size_t i = 0; i < count; ++i) {
        const uint64_t g = Below(500, &random);
        sum.runs.back().grads.push_back(g);
        for (uint64_t e = 0; e < row; ++e) {
          want.as<float>()[r * row + e] += static_cast<float>(
              Get(grads, Number::kHalf, g * row + e));
        }
      }
    }
    ASSERT_EQ(Enqueue(sum, nullptr), "");
    ExpectSame(to.Read(), want, Number::kFloat, "sums");
  }
}

TEST_P(Launches, MarkRows) {
  Random random(26);
  const uint64_t rows = 9000;
  std::vector<Array> want;
  std::vector<OnDevice> got;
  RowMarks marks;
  marks.touched = {{}, {3}, std::vector<uint64_t>(6000)};
  for (uint64_t& row : marks.touched[2]) row = Below(rows, &random);
  for (size_t a = 0; a < 5; ++a) {
    want.emplace_back((rows + 1) * sizeof(double));
    double* const logs = want.back().as<double>();
    for (uint64_t r = 0; r <= rows; ++r) logs[r] = r == rows ? -3 : -1;
    got.emplace_back(want.back());
    marks.averages.push_back({got.back().address(), rows, -0.5, a % 3});
    // As if they had taken the step.
    for (const uint64_t row : marks.touched[a % 3]) logs[row] = -3.5;
    logs[rows] = -3.5;
  }
  ASSERT_EQ(Enqueue(marks, nullptr), "");
  for (size_t a = 0; a < 5; ++a) {
    ExpectSame(got[a].Read(), want[a], Number::kDouble,
               "log decays " + std::to_string(a));
  }
}

TEST_P(Launches, SayWhatIsWrong) {
  Update update;
  update.rule = RuleId::kGradientDescent;
  update.scalars = {0.1};
  update.elements = {1};
  update.arrays = 3;
  update.addresses = {0, 0, 0};
  EXPECT_EQ(Enqueue(update, nullptr),
            "each variable must have 2 arrays, got 3");
  // An address that is not the device's.
  update.arrays = 2;
  update.addresses = {4096, 8192};
  EXPECT_EQ(Enqueue(update, nullptr).substr(0, 14), "cuLaunchKernel");
  // So are the addresses of numbers.
  const OnDevice arrays(Array(64));
  update.addresses = {arrays.address(), arrays.address() + 32};
  EXPECT_EQ(Enqueue(update, nullptr), "");
  update.accept = arrays.address();
  update.numbers = 4096;
  const std::string missing =
      "there are no kernels for XLA programs on fake GPU (compute capability "
      "6.0, driver for CUDA 12.8): they need compute capability 7.0 and a "
      "driver for CUDA 12.1. Set WRAPOPT_XLA_ON_GPU=hlo";
  EXPECT_EQ(LoadForProgram(update), HasLargeTables() ? "" : missing);
  const std::string refused = HasLargeTables() ? "cuLaunchKernel" : missing;
  EXPECT_EQ(Enqueue(update, nullptr).substr(0, refused.size()), refused);
  update.accept = 4096;
  update.numbers = arrays.address();
  EXPECT_EQ(Enqueue(update, nullptr).substr(0, refused.size()), refused);
  update.elements = {0};
  EXPECT_EQ(Enqueue(update, nullptr), "");
  FakeGpu::Get().Call("cuCtxSetCurrent", static_cast<void*>(nullptr));
  EXPECT_EQ(Enqueue(update, nullptr), "no CUDA context is current");
  EXPECT_EQ(LoadForProgram(update), "no CUDA context is current");
}

}  // namespace
}  // namespace gpu
}  // namespace wrapopt
