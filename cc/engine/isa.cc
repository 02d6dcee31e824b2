#include "cc/engine/isa.h"

#include <cstdlib>

#if defined(__aarch64__)
#include <sys/auxv.h>
#include <sys/prctl.h>
#endif

namespace wrapopt {

std::vector<Isa> SupportedIsas() {
  std::vector<Isa> isas = {Isa::kBaseline};
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("x86-64-v3")) isas.push_back(Isa::kX86_64_v3);
  if (__builtin_cpu_supports("x86-64-v4")) isas.push_back(Isa::kX86_64_v4);
#elif defined(__aarch64__)
  // SVE takes fewer instructions for an element only if its registers are
  // longer than NEON's 128 bits.
  constexpr unsigned long kHasSve = 1 << 22;     // Linux's HWCAP_SVE,
  constexpr int kGetLength = 51, kMask = 0xffff;  // and PR_SVE_GET_VL.
  if (getauxval(AT_HWCAP) & kHasSve) {
    const bool is_long = (prctl(kGetLength) & kMask) > 16;
    isas.insert(is_long ? isas.end() : isas.begin(), Isa::kSve);
  }
#endif
  return isas;
}

bool IsaFromName(const std::string& name, Isa* isa, std::string* error) {
  const std::vector<Isa> supported = SupportedIsas();
  if (name.empty()) {
    *isa = supported.back();
    return true;
  }
  std::string names;
  for (const Isa candidate : supported) {
    const char* candidate_name = kIsaNames[static_cast<int>(candidate)];
    if (name == candidate_name) {
      *isa = candidate;
      return true;
    }
    names += names.empty() ? "" : ", ";
    names += candidate_name;
  }
  *error = "the CPU instruction set must be one that this processor has (" +
           names + "), got '" + name + "'";
  return false;
}

bool ChosenIsa(Isa* isa, std::string* error) {
  static const std::string name = [] {
    const char* value = std::getenv("WRAPOPT_CPU_ISA");
    return std::string(value == nullptr ? "" : value);
  }();
  if (IsaFromName(name, isa, error)) return true;
  *error = "WRAPOPT_CPU_ISA: " + *error;
  return false;
}

}  // namespace wrapopt
