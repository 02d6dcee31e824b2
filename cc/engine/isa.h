// The instruction set of the CPU kernels, which is chosen once per process.
#ifndef WRAPOPT_CC_ENGINE_ISA_H_
#define WRAPOPT_CC_ENGINE_ISA_H_

#include <string>
#include <vector>

namespace wrapopt {

#if defined(__aarch64__)
enum class Isa { kBaseline, kSve };

inline constexpr const char* kIsaNames[] = {"baseline", "sve"};
#else
enum class Isa { kBaseline, kX86_64_v3, kX86_64_v4 };

inline constexpr const char* kIsaNames[] = {"baseline", "x86-64-v3",
                                            "x86-64-v4"};
#endif

// The instruction sets that this processor supports, the best last.
std::vector<Isa> SupportedIsas();

// The instruction set that the environment variable WRAPOPT_CPU_ISA names, else
// the best. If the name is unknown or not supported by this processor, returns
// false and sets *error.
bool ChosenIsa(Isa* isa, std::string* error);

// The same for any name. An empty name is the best.
bool IsaFromName(const std::string& name, Isa* isa, std::string* error);

}  // namespace wrapopt

#endif  // WRAPOPT_CC_ENGINE_ISA_H_
