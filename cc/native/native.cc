// The C functions of wrapopt/_native.py: facts about the build, and the CPU
// engine on arrays. They need neither TensorFlow nor Python, so one library
// serves all their versions.
#include <cstddef>
#include <cstdio>
#include <exception>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "cc/engine/codes.h"
#include "cc/engine/elementwise.h"
#include "cc/engine/isa.h"
#include "cc/engine/number.h"
#include "cc/gpu/driver.h"
#include "cc/gpu/images.h"
#include "cc/rules/rules.h"

#define WRAPOPT_EXPORT extern "C" __attribute__((visibility("default")))

namespace wrapopt {
namespace {

// The functions return JSON.

std::string Json(std::string_view text) {
  std::string json = "\"";
  for (const char c : text) {
    if (static_cast<unsigned char>(c) < 0x20) {
      char escaped[8];
      std::snprintf(escaped, sizeof(escaped), "\\u%04x", c);
      json += escaped;
      continue;
    }
    if (c == '"' || c == '\\') json += '\\';
    json += c;
  }
  return json + "\"";
}

template <class Strings>
std::string JsonList(const Strings& strings) {
  std::string json = "[";
  for (const auto& s : strings) json += (json.size() > 1 ? "," : "") + Json(s);
  return json + "]";
}

// Returns {"value": the result of make()}, or {"error": the message of its
// exception}. The text lives until the next call in the same thread.
template <class Make>
const char* Answer(Make make) {
  thread_local std::string answer;
  try {
    answer = "{\"value\":" + make() + "}";
  } catch (const std::exception& e) {
    answer = "{\"error\":" + Json(e.what()) + "}";
  }
  return answer.c_str();
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

std::string Facts() {
  std::vector<std::string> isas;
  for (const Isa isa : SupportedIsas()) {
    isas.push_back(kIsaNames[static_cast<int>(isa)]);
  }
  std::vector<std::string> images;
  for (const gpu::Image& image : gpu::Images()) {
    images.push_back(gpu::NameOf(image));
  }
  std::string rules;
  for (const RuleInfo& rule : kRules) {
    const std::string_view facts[] = {
        rule.name, rule.states, rule.inputs, rule.scalars,
        rule.sparse == Sparse::kAll ? "all rows" : ""};
    rules += (rules.empty() ? "[" : ",") + JsonList(facts);
  }
  return "{\"version\":" + Json(WRAPOPT_VERSION) +
         ",\"compiler\":" + Json("g++ " __VERSION__) +
         ",\"cpu_isas\":" + JsonList(isas) +
         ",\"gpu_images\":" + JsonList(images) + ",\"rules\":" + rules + "]}";
}

std::string Version(int major, int minor) {
  return std::to_string(major) + "." + std::to_string(minor);
}

std::string Gpus() {
  std::vector<gpu::DeviceInfo> devices;
  const std::string error = gpu::Describe(&devices);
  if (!error.empty()) throw std::runtime_error(error);
  std::string gpus;
  for (const gpu::DeviceInfo& device : devices) {
    std::vector<std::string> images;
    for (const gpu::Kind kind : gpu::kKinds) {
      if (const gpu::Image* image = gpu::ChooseImage(device, kind)) {
        images.push_back(gpu::NameOf(*image));
      }
    }
    gpus += (gpus.empty() ? "[" : ",[") + Json(device.name) + "," +
            Json(Version(device.compute_capability / 10,
                         device.compute_capability % 10)) +
            "," +
            Json(Version(device.driver / 1000, device.driver % 1000 / 10)) +
            "," + JsonList(images) + "]";
  }
  return "[" + gpus + "]";
}

constexpr const char* kNumberNames[] = {"float16", "bfloat16", "float32",
                                        "float64"};

}  // namespace
}  // namespace wrapopt

// Facts that do not change while the process runs.
WRAPOPT_EXPORT const char* wrapopt_facts() {
  return wrapopt::Answer(wrapopt::Facts);
}

// The instruction set in use.
WRAPOPT_EXPORT const char* wrapopt_cpu_isa() {
  return wrapopt::Answer([] {
    const wrapopt::Isa isa = wrapopt::IsaOf("");
    return wrapopt::Json(wrapopt::kIsaNames[static_cast<int>(isa)]);
  });
}

// [[name, compute capability, CUDA version of the driver, [image, ...]], ...]
WRAPOPT_EXPORT const char* wrapopt_gpus() {
  return wrapopt::Answer(wrapopt::Gpus);
}

// Applies a rule, in place: `operands` are its states and inputs, each of
// `size` numbers. wrapopt/_native.py has checked all arguments, except the
// instruction set and whether there is a kernel for these types.
WRAPOPT_EXPORT const char* wrapopt_step(int rule, void* const* operands,
                                        int state, int input,
                                        const double* scalars, size_t size,
                                        const char* isa) {
  return wrapopt::Answer([&] {
    using namespace wrapopt;  // NOLINT
    const RuleInfo& info = kRules[rule];
    const StepFn step =
        FindStep(info.id, static_cast<Number>(state),
                 static_cast<Number>(input), IsaOf(isa));
    if (step == nullptr) {
      throw std::invalid_argument(
          std::string(info.name) + " has no kernel for states of dtype " +
          kNumberNames[state] + " and inputs of dtype " + kNumberNames[input]);
    }
    step(operands, scalars, 0, size, {size});
    return std::string("null");
  });
}

// As EncodeFn and DecodeFn of cc/engine/codes.h, of `size` numbers.
// wrapopt/_native.py has checked all arguments.
WRAPOPT_EXPORT const char* wrapopt_encode(int code, int number,
                                          const void* values,
                                          const float* center,
                                          const float* error, size_t size,
                                          void* coded, float* new_error) {
  return wrapopt::Answer([&] {
    using namespace wrapopt;  // NOLINT
    FindEncode(static_cast<Code>(code), static_cast<Number>(number),
               IsaOf(""))(values, center, error, size, coded, new_error);
    return std::string("null");
  });
}

WRAPOPT_EXPORT const char* wrapopt_add_decoded(int code, const float* center,
                                               const void* coded, size_t size,
                                               float* sum) {
  return wrapopt::Answer([&] {
    using namespace wrapopt;  // NOLINT
    FindDecode(static_cast<Code>(code), IsaOf(""))(center, coded, nullptr, size,
                                                   sum);
    return std::string("null");
  });
}
