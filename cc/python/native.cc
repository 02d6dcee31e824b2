// The Python module wrapopt._native: what this copy of wrapopt was built with,
// and the CPU engine on numpy arrays. It needs no TensorFlow: the loader asks
// it for the build facts before TensorFlow's library is touched.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <new>
#include <stdexcept>
#include <sstream>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "cc/kernels/elementwise_cpu.h"
#include "cc/kernels/isa.h"
#include "cc/kernels/number.h"
#include "cc/rules/rules.h"

namespace py = pybind11;

namespace wrapopt {
namespace {

Number NumberOf(const py::array& array, const std::string& subject) {
  const std::string name = py::str(array.dtype());
  if (name == "float16") return Number::kHalf;
  if (name == "bfloat16") return Number::kBfloat16;
  if (name == "float32") return Number::kFloat;
  if (name == "float64") return Number::kDouble;
  throw std::invalid_argument(
      subject + " must be of dtype float16, bfloat16, float32 or float64, got " +
      name);
}

Isa IsaOf(const std::string& name) {
  Isa isa;
  std::string error;
  if (!(name.empty() ? ChosenIsa(&isa, &error)
                     : IsaFromName(name, &isa, &error))) {
    throw std::invalid_argument(error);
  }
  return isa;
}

void Count(const char* what, size_t got, size_t expected,
           const std::string& rule) {
  if (got == expected) return;
  throw std::invalid_argument(rule + " takes " + std::to_string(expected) + " " +
                              what + ", got " + std::to_string(got));
}

std::vector<std::string> Names(std::string_view names) {
  std::vector<std::string> split;
  std::istringstream stream{std::string(names)};
  for (std::string name; stream >> name;) split.push_back(name);
  return split;
}

// Applies a rule, in place, to flat arrays.
void Step(const std::string& name, std::vector<py::array> states,
          std::vector<py::array> inputs, const std::vector<double>& scalars,
          const std::string& isa) {
  const RuleInfo* rule = nullptr;
  for (const RuleInfo& info : kRules) {
    if (name == info.name) rule = &info;
  }
  if (rule == nullptr) throw std::invalid_argument("no rule '" + name + "'");
  Count("states", states.size(), CountNames(rule->states), name);
  Count("inputs", inputs.size(), CountNames(rule->inputs), name);
  Count("scalars", scalars.size(), CountNames(rule->scalars), name);

  std::vector<void*> operands;
  auto check = [&](const py::array& array, const py::array& like,
                   const std::string& subject) {
    if (!(array.flags() & py::array::c_style)) {
      throw std::invalid_argument(subject + " must be contiguous");
    }
    if (array.size() != like.size()) {
      throw std::invalid_argument(
          subject + " misshapen: got " + std::to_string(array.size()) +
          " elements but expected " + std::to_string(like.size()));
    }
    if (NumberOf(array, subject) != NumberOf(like, subject)) {
      throw std::invalid_argument(
          subject + " must be of dtype " + std::string(py::str(like.dtype())) +
          " like the first, got " + std::string(py::str(array.dtype())));
    }
  };
  for (size_t i = 0; i < states.size(); ++i) {
    check(states[i], states[0], "states[" + std::to_string(i) + "]");
    operands.push_back(states[i].mutable_data());
  }
  for (size_t i = 0; i < inputs.size(); ++i) {
    const std::string subject = "inputs[" + std::to_string(i) + "]";
    check(inputs[i], inputs[0], subject);
    if (inputs[i].size() != states[0].size()) {
      throw std::invalid_argument(
          subject + " misshapen: got " + std::to_string(inputs[i].size()) +
          " elements but expected " + std::to_string(states[0].size()) +
          " (the size of states[0])");
    }
    operands.push_back(const_cast<void*>(inputs[i].data()));
  }
  const Number state = NumberOf(states[0], "states");
  const Number input = inputs.empty() ? state : NumberOf(inputs[0], "inputs");
  const StepFn step = FindStep(rule->id, state, input, IsaOf(isa));
  if (step == nullptr) {
    throw std::invalid_argument(
        name + " has no kernel for states of dtype " +
        std::string(py::str(states[0].dtype())) + " and inputs of dtype " +
        std::string(py::str(inputs[0].dtype())));
  }
  py::gil_scoped_release release;
  step(operands.data(), scalars.data(), 0, states[0].size());
}

struct FreeDeleter {
  void operator()(float* p) const { std::free(p); }
};
using Buffer = std::unique_ptr<float, FreeDeleter>;

// As TensorFlow allocates a tensor: aligned, and no request for huge pages.
Buffer Allocate(size_t elements) {
  void* p = nullptr;
  if (posix_memalign(&p, 64, std::max<size_t>(elements, 1) * sizeof(float))) {
    throw std::bad_alloc();
  }
  return Buffer(static_cast<float*>(p));
}

#if defined(__x86_64__)
#define WRAPOPT_CLONES __attribute__((target_clones("avx2", "default")))
#else
#define WRAPOPT_CLONES
#endif

constexpr size_t kMaxReads = 2;

// Adds `reads` to each of `writes`: as little arithmetic as can be had for one
// pass over that many arrays. Blocks stay in the first-level cache, so that
// memory sees each array once and the prefetchers see few at a time: with all
// four at once, three writes take half as long again.
WRAPOPT_CLONES void StreamLoop(const std::vector<float*>& reads,
                               const std::vector<float*>& writes, size_t begin,
                               size_t end) {
  constexpr size_t kBlock = 4096;
  const float* const a = reads.size() > 0 ? reads[0] : nullptr;
  const float* const b = reads.size() > 1 ? reads[1] : nullptr;
  for (size_t from = begin; from < end; from += kBlock) {
    const size_t to = std::min(from + kBlock, end);
    for (float* const w : writes) {
      if (b != nullptr) {
#pragma GCC ivdep
        for (size_t j = from; j < to; ++j) w[j] += a[j] + b[j];
      } else if (a != nullptr) {
#pragma GCC ivdep
        for (size_t j = from; j < to; ++j) w[j] += a[j];
      } else {
#pragma GCC ivdep
        for (size_t j = from; j < to; ++j) w[j] += 1.0f;
      }
    }
  }
}

// What the machine can do: threads that each go once over their part of
// `reads` read-only and `writes` read-and-written float32 arrays.
class StreamLimit {
 public:
  StreamLimit(std::vector<size_t> sizes, size_t reads, size_t writes)
      : sizes_(std::move(sizes)), reads_(reads), writes_(writes) {
    if (reads > kMaxReads || writes == 0) {
      throw std::invalid_argument(
          "at most " + std::to_string(kMaxReads) +
          " reads and at least 1 write, got " + std::to_string(reads) +
          " and " + std::to_string(writes));
    }
    for (const size_t size : sizes_) {
      for (size_t k = 0; k < reads_ + writes_; ++k) {
        buffers_.push_back(Allocate(size));
        std::fill_n(buffers_.back().get(), size, 0.0f);
      }
    }
  }

  // Seconds for one pass over everything by `threads` threads.
  double Run(int threads) {
    if (threads < 1) {
      throw std::invalid_argument("threads must be at least 1, got " +
                                  std::to_string(threads));
    }
    auto part = [&](int thread) {
      std::vector<float*> reads(reads_), writes(writes_);
      auto buffer = buffers_.begin();
      for (const size_t size : sizes_) {
        for (float*& p : reads) p = (buffer++)->get();
        for (float*& p : writes) p = (buffer++)->get();
        StreamLoop(reads, writes, size * thread / threads,
                   size * (thread + 1) / threads);
      }
    };
    const auto start = std::chrono::steady_clock::now();
    std::vector<std::thread> others;
    for (int t = 1; t < threads; ++t) others.emplace_back(part, t);
    part(0);
    for (std::thread& t : others) t.join();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() -
                                         start)
        .count();
  }

  size_t bytes() const {
    size_t elements = 0;
    for (const size_t size : sizes_) elements += size;
    return elements * sizeof(float) * (reads_ + 2 * writes_);
  }

 private:
  std::vector<size_t> sizes_;
  size_t reads_;
  size_t writes_;
  std::vector<Buffer> buffers_;
};

}  // namespace
}  // namespace wrapopt

PYBIND11_MODULE(_native, m) {
  using namespace wrapopt;  // NOLINT
  m.doc() = "What this copy of wrapopt was built with, and its CPU engine.";

  m.attr("version") = WRAPOPT_VERSION;
  m.attr("tensorflow_version") = WRAPOPT_TF_VERSION;
  m.attr("cxx11_abi") = WRAPOPT_CXX11_ABI;
  m.attr("absl_namespace") = WRAPOPT_ABSL_NAMESPACE;
  m.attr("python_tag") = WRAPOPT_PYTHON_TAG;
  m.attr("compiler") = "g++ " __VERSION__;

  m.def(
      "cpu_isas",
      [] {
        std::vector<std::string> names;
        for (const Isa isa : SupportedIsas()) {
          names.push_back(kIsaNames[static_cast<int>(isa)]);
        }
        return names;
      },
      "Instruction sets of this processor that have kernels, the best last.");
  m.def(
      "cpu_isa",
      [] { return std::string(kIsaNames[static_cast<int>(IsaOf(""))]); },
      "The one in use: the best, or what WRAPOPT_CPU_ISA names.");

  m.def(
      "rules",
      [] {
        py::dict rules;
        for (const RuleInfo& rule : kRules) {
          rules[rule.name] =
              py::make_tuple(Names(rule.states), Names(rule.inputs),
                             Names(rule.scalars));
        }
        return rules;
      },
      "{rule: (names of its states, of its inputs, of its scalars)}");
  m.def("step", &Step, py::arg("rule"), py::arg("states"), py::arg("inputs"),
        py::arg("scalars"), py::arg("isa") = "",
        "Applies `rule` to `states` in place. Arrays are contiguous and of one "
        "size; states are of one dtype, inputs of one dtype.");

  py::class_<StreamLimit>(m, "StreamLimit",
                          "The memory bandwidth of this machine, measured by a "
                          "plain threaded loop over float32 arrays.")
      .def(py::init<std::vector<size_t>, size_t, size_t>(), py::arg("sizes"),
           py::arg("reads"), py::arg("writes"))
      .def("run", &StreamLimit::Run, py::arg("threads"),
           py::call_guard<py::gil_scoped_release>(),
           "Seconds for one pass over every array.")
      .def_property_readonly("bytes", &StreamLimit::bytes,
                             "Bytes that one pass moves.");
}
