// The Python module wrapopt._native: what this copy of wrapopt was built with,
// and the CPU engine on numpy arrays. It needs no TensorFlow: the loader asks
// it for the build facts before TensorFlow's library is touched.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <stdexcept>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cc/gpu/driver.h"
#include "cc/gpu/images.h"
#include "cc/kernels/elementwise_cpu.h"
#include "cc/kernels/isa.h"
#include "cc/kernels/number.h"
#include "cc/python/stream_limit.h"
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

std::string Version(int major, int minor) {
  return std::to_string(major) + "." + std::to_string(minor);
}

py::list Gpus() {
  std::vector<gpu::DeviceInfo> devices;
  const std::string error = gpu::Describe(&devices);
  if (!error.empty()) throw std::runtime_error(error);
  py::list gpus;
  for (const gpu::DeviceInfo& device : devices) {
    std::vector<std::string> images;
    for (const bool is_large : {false, true}) {
      if (const gpu::Image* image = gpu::ChooseImage(device, is_large)) {
        images.push_back(gpu::NameOf(*image));
      }
    }
    gpus.append(py::make_tuple(device.name,
                               Version(device.compute_capability / 10,
                                       device.compute_capability % 10),
                               Version(device.driver / 1000,
                                       device.driver % 1000 / 10),
                               images));
  }
  return gpus;
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
  step(operands.data(), scalars.data(), 0, states[0].size(),
       {static_cast<size_t>(states[0].size())});
}

// The caller keeps the lists, and so the arrays, alive.
StreamLimit MakeStreamLimit(const py::list& read, const py::list& written) {
  std::vector<StreamLimit::Arrays> arrays;
  std::string first;  // What is called so has the sizes of all.
  // Calls use(place, its array) for each array of a row.
  auto each = [&](const char* list, const py::list& rows, auto use) {
    for (size_t k = 0; k < rows.size(); ++k) {
      const std::string subject =
          std::string(list) + "[" + std::to_string(k) + "]";
      const py::list row = py::cast<py::list>(rows[k]);
      if (first.empty()) {
        first = subject;
        arrays.resize(row.size());
      } else if (row.size() != arrays.size()) {
        throw std::invalid_argument(
            subject + " must hold one array for each of the " +
            std::to_string(arrays.size()) + " in " + first + ", got " +
            std::to_string(row.size()));
      }
      for (size_t i = 0; i < row.size(); ++i) {
        const std::string place = "[" + std::to_string(i) + "]";
        if (!py::isinstance<py::array_t<float, py::array::c_style>>(row[i])) {
          throw std::invalid_argument(subject + place +
                                      " must be a float32 array");
        }
        const py::array array = py::reinterpret_borrow<py::array>(row[i]);
        const size_t size = array.size();
        if (subject == first) arrays[i].size = size;
        if (size != arrays[i].size) {
          throw std::invalid_argument(
              subject + place + " misshapen: got " + std::to_string(size) +
              " elements but expected " + std::to_string(arrays[i].size) +
              " (the size of " + first + place + ")");
        }
        use(&arrays[i], static_cast<float*>(const_cast<void*>(array.data())));
      }
    }
  };
  each("read", read, [](StreamLimit::Arrays* a, float* data) {
    a->read.push_back(data);
  });
  each("written", written, [](StreamLimit::Arrays* a, float* data) {
    a->written.push_back(data);
  });
  return StreamLimit(std::move(arrays));
}

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
      "gpu_images",
      [] {
        std::vector<std::string> names;
        for (const gpu::Image& image : gpu::Images()) {
          names.push_back(gpu::NameOf(image));
        }
        return names;
      },
      "What the GPU kernels are compiled for.");
  m.def("gpus", &Gpus,
        "[(name, compute capability, CUDA version of the driver, images that "
        "it gets)] of this machine's GPUs. Raises RuntimeError if it cannot "
        "tell.");

  py::class_<RuleInfo>(m, "Rule", "A line of cc/rules/rules.h.")
      .def_property_readonly(
          "states", [](const RuleInfo& rule) { return Names(rule.states); })
      .def_property_readonly(
          "inputs", [](const RuleInfo& rule) { return Names(rule.inputs); })
      .def_property_readonly(
          "scalars", [](const RuleInfo& rule) { return Names(rule.scalars); },
          "With a question mark, those that are attributes.")
      .def_property_readonly(
          "is_update",
          [](const RuleInfo& rule) { return rule.inputs == "grad"; },
          "Whether it is an optimizer's step and has ops, Apply<Rule>.")
      .def_property_readonly(
          "all_rows",
          [](const RuleInfo& rule) { return rule.sparse == Sparse::kAll; },
          "Whether the step of a sparse gradient is taken for all rows.");
  m.def(
      "rules",
      [] {
        py::dict rules;
        for (const RuleInfo& rule : kRules) {
          rules[rule.name] =
              py::cast(&rule, py::return_value_policy::reference);
        }
        return rules;
      },
      "{name: Rule} of all rules.");
  m.def("step", &Step, py::arg("rule"), py::arg("states"), py::arg("inputs"),
        py::arg("scalars"), py::arg("isa") = "",
        "Applies `rule` to `states` in place. Arrays are contiguous and of one "
        "size; states are of one dtype, inputs of one dtype.");

  py::class_<StreamLimit>(
      m, "StreamLimit",
      "The memory bandwidth of this machine: a threaded loop that adds the "
      "arrays of each list in `read`, float32 all, to those in the same place of "
      "each list in `written`. It writes also to arrays that are read-only to "
      "numpy, as tensors are.")
      .def(py::init(&MakeStreamLimit), py::arg("read"), py::arg("written"),
           py::keep_alive<1, 2>(), py::keep_alive<1, 3>())
      .def("run", &StreamLimit::Run, py::arg("threads"),
           py::call_guard<py::gil_scoped_release>(),
           "Seconds for one pass over every array.")
      .def_property_readonly("bytes", &StreamLimit::bytes,
                             "Bytes that one pass moves.");
}
