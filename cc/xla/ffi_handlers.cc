#include "cc/xla/ffi_handlers.h"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/types/span.h"
#include "cc/engine/elementwise.h"
#include "cc/engine/isa.h"
#include "cc/engine/number.h"
#include "cc/engine/row_step.h"
#include "cc/engine/sparse_rows.h"
#include "cc/engine/threads.h"
#include "cc/gpu/launcher.h"
#include "cc/kernels/averages.h"
#include "cc/kernels/inputs.h"
#include "cc/kernels/sort_rows.h"
#include "cc/ops/apply.h"
#include "cc/ops/contracts.h"
#include "cc/rules/rules.h"
#include "cc/xla/operands.h"
#include "tensorflow/core/platform/errors.h"
#include "tensorflow/core/platform/logging.h"
#include "xla/ffi/api/ffi.h"

namespace xla::ffi {
// Declared in xla/ffi/ffi_api.h, which includes much of XLA.
const XLA_FFI_Api* GetXlaFfiApi();
}  // namespace xla::ffi

namespace wrapopt {
namespace {

// The intra-op thread pool of the device that runs the program.
class ProgramThreads final : public Threads {
 public:
  explicit ProgramThreads(ffi::ThreadPool* pool) : pool_(*pool) {}

  int64_t count() const override { return pool_.num_threads(); }
  void Schedule(std::function<void()> task) const override {
    pool_.Schedule(std::move(task));
  }

 private:
  ffi::ThreadPool& pool_;
};

using Arrays = Operands::Arrays;

// Adds the operands of the averages of value `i`, for the stages that
// AddAverages has added to a pass.
void AddOperands(const Arrays& shadows, const Arrays& values, size_t i,
                 std::vector<void*>* operands) {
  for (size_t s = i; s < shadows.buffers.size(); s += values.buffers.size()) {
    operands->push_back(shadows[s]);
    operands->push_back(values[i]);
  }
}

// Updates all averages of the values.
void UpdateAverages(const Threads& threads, const std::vector<double>& rates,
                    const Arrays& shadows, const Arrays& values, Isa isa) {
  if (rates.empty()) return;
  Pass pass;
  AddAverages(FindStep(RuleId::kEma, shadows.number, values.number, isa), rates,
              SizeOf(values.number), &pass);
  std::vector<void*> operands;
  for (size_t i = 0; i < values.buffers.size(); ++i) {
    operands.clear();
    AddOperands(shadows, values, i, &operands);
    pass.AddVariable(values.elements(i), operands);
  }
  RunPass(threads, pass);
}

// The averages of value `i`, whose rows may lag behind. `rates` and `decays`
// are those of a step. They are empty if there is no step.
std::vector<LazyAverage> LazyAverages(const Arrays& shadows,
                                      const Arrays& values,
                                      const Arrays& log_decays, size_t i,
                                      const std::vector<double>& rates,
                                      absl::Span<const double> decays,
                                      Isa isa) {
  std::vector<LazyAverage> averages;
  const size_t n = values.buffers.size();
  const int64_t rows = values.rows(i);
  for (size_t at = i; at < log_decays.buffers.size(); at += n) {
    const size_t k = at / n;
    averages.push_back(
        {FindMoveRows(shadows.number, values.number, isa),
         static_cast<char*>(shadows[at]), static_cast<const char*>(values[i]),
         SizeOf(shadows.number), SizeOf(values.number), rows,
         rows == 0 ? 0 : values.elements(i) / rows,
         static_cast<double*>(log_decays[at]), rates.empty() ? 0 : rates[k],
         decays.empty() ? 0 : ShadowContract::LogOf(decays[k]),
         /*keeps_buffers=*/false});
  }
  return averages;
}

// Sorts the first `counts[i]` of each of `indices`, which are rows of `values`.
absl::Status Sort(const Threads& threads,
                  const std::vector<ffi::AnyBuffer>& indices,
                  absl::Span<const int64_t> counts, const Arrays& values,
                  std::string_view names, std::vector<SparseRows>* sorted) {
  const std::vector<std::string> name =
      absl::StrSplit(absl::string_view(names.data(), names.size()), '\0');
  sorted->resize(indices.size());
  for (size_t i = 0; i < indices.size(); ++i) {
    const auto sort = [&](const auto* data) {
      return SortRows(threads, data, counts[i], i, values.rows(i), name[i],
                      &(*sorted)[i]);
    };
    const void* const data = indices[i].untyped_data();
    TF_RETURN_IF_ERROR(indices[i].element_type() == ffi::S32
                           ? sort(static_cast<const int32_t*>(data))
                           : sort(static_cast<const int64_t*>(data)));
  }
  return absl::OkStatus();
}

// The operands of a step that Apply and SparseApply share.
struct StepOperands {
  const RuleInfo* rule = nullptr;
  Isa isa = Isa::kBaseline;
  bool accept = false;
  absl::Span<const double> decays, scalars;
  std::vector<double> rates;
  size_t n = 0;
  std::vector<Arrays> states;
  Arrays shadows;

  // Takes the operands before the variables. If the step is not accepted, only
  // `accept` is taken.
  absl::Status Take(std::string_view rule_name, Operands* operands) {
    TF_RETURN_IF_ERROR(
        FindUpdate({rule_name.data(), rule_name.size()}, &rule));
    TF_RETURN_IF_ERROR(FindIsa(&isa));
    const bool* const flag = operands->Bool();
    accept = flag != nullptr && *flag;
    if (!accept) return operands->status();
    decays = operands->Doubles();
    TF_RETURN_IF_ERROR(ToRates(decays, &rates));
    scalars = operands->Doubles();
    return operands->status();
  }
  void TakeVariables(Operands* operands) {
    for (size_t s = 0; s < CountNames(rule->states); ++s) {
      states.push_back(operands->Written(n));
    }
    shadows = operands->Written(rates.size() * n);
  }
};

absl::Status Apply(const Threads& threads, Operands* operands,
                   std::string_view rule_name) {
  StepOperands step;
  TF_RETURN_IF_ERROR(step.Take(rule_name, operands));
  if (!step.accept) return absl::OkStatus();
  step.n = operands->left() /
           (CountNames(step.rule->states) + step.rates.size() + 1);
  step.TakeVariables(operands);
  const Arrays grad = operands->Read(step.n);
  TF_RETURN_IF_ERROR(operands->status());

  Pass pass;
  const Arrays& var = step.states[0];
  const int states = step.states.size();
  pass.AddStage({FindStep(step.rule->id, var.number, grad.number, step.isa),
                 step.scalars.data(), states + 1,
                 2 * states * SizeOf(var.number) + SizeOf(grad.number),
                 /*new_inputs=*/true});
  AddAverages(
      FindStep(RuleId::kEma, step.shadows.number, var.number, step.isa),
      step.rates, /*value_bytes=*/0, &pass);
  std::vector<void*> of_variable;
  for (size_t i = 0; i < step.n; ++i) {
    of_variable.clear();
    for (const Arrays& state : step.states) of_variable.push_back(state[i]);
    of_variable.push_back(grad[i]);
    AddOperands(step.shadows, var, i, &of_variable);
    pass.AddVariable(var.elements(i), of_variable);
  }
  RunPass(threads, pass);
  return absl::OkStatus();
}

absl::Status SparseApply(const Threads& threads, Operands* operands,
                         std::string_view rule_name, std::string_view names) {
  StepOperands step;
  TF_RETURN_IF_ERROR(step.Take(rule_name, operands));
  if (!step.accept) return absl::OkStatus();
  const absl::Span<const int64_t> counts = operands->Counts();
  step.n = counts.size();
  step.TakeVariables(operands);
  const size_t averages = step.rates.size() * step.n;
  const bool lazy = averages > 0 && operands->left() > 2 * step.n;
  const Arrays log_decays = operands->Written(lazy ? averages : 0);
  const Arrays grad = operands->Read(step.n);
  const std::vector<ffi::AnyBuffer> indices = operands->Indices(step.n);
  TF_RETURN_IF_ERROR(operands->status());
  const Arrays& var = step.states[0];
  std::vector<SparseRows> sorted;
  TF_RETURN_IF_ERROR(Sort(threads, indices, counts, var, names, &sorted));

  const RowStep row_step(*step.rule, var.number, grad.number, step.isa);
  for (size_t i = 0; i < step.n; ++i) {
    std::vector<void*> states;
    const void* grads = grad[i];
    std::vector<char> copy;
    for (const Arrays& state : step.states) {
      states.push_back(state[i]);
      // If a gradient equals a variable, XLA may use one buffer for both. The
      // step of one row must not change the gradient of another row.
      if (grads == state[i] && copy.empty()) {
        const char* const begin = static_cast<const char*>(grads);
        copy.assign(begin, begin + grad.buffers[i].size_bytes());
        grads = copy.data();
      }
    }
    row_step.Run(threads, states, var.rows(i), var.elements(i), grads,
                 sorted[i], step.scalars.data(),
                 LazyAverages(step.shadows, var, log_decays, i, step.rates,
                              step.decays, step.isa));
  }
  if (!lazy) {
    UpdateAverages(threads, step.rates, step.shadows, var, step.isa);
  }
  return absl::OkStatus();
}

absl::Status EmaUpdate(const Threads& threads, Operands* operands) {
  Isa isa = Isa::kBaseline;
  TF_RETURN_IF_ERROR(FindIsa(&isa));
  std::vector<double> rates;
  TF_RETURN_IF_ERROR(ToRates(operands->Doubles(), &rates));
  const size_t n = operands->left() / (rates.size() + 1);
  const Arrays shadows = operands->Written(rates.size() * n);
  const Arrays values = operands->Read(n);
  TF_RETURN_IF_ERROR(operands->status());
  UpdateAverages(threads, rates, shadows, values, isa);
  return absl::OkStatus();
}

absl::Status MoveRows(const Threads& threads, Operands* operands, int64_t n,
                      std::string_view names) {
  Isa isa = Isa::kBaseline;
  TF_RETURN_IF_ERROR(FindIsa(&isa));
  const absl::Span<const double> decays = operands->Doubles();
  std::vector<double> rates;
  TF_RETURN_IF_ERROR(ToRates(decays, &rates));
  const absl::Span<const int64_t> counts = operands->Counts();
  const size_t averages = (operands->left() - n - counts.size()) / 2;
  const Arrays shadows = operands->Written(averages);
  const Arrays log_decays = operands->Written(averages);
  const Arrays values = operands->Read(n);
  const std::vector<ffi::AnyBuffer> indices = operands->Indices(counts.size());
  TF_RETURN_IF_ERROR(operands->status());
  std::vector<SparseRows> sorted;
  TF_RETURN_IF_ERROR(Sort(threads, indices, counts, values, names, &sorted));

  for (int64_t i = 0; i < n; ++i) {
    for (const LazyAverage& average : LazyAverages(
             shadows, values, log_decays, i, rates, decays, isa)) {
      if (sorted.empty()) {
        average.CatchUpAll(threads);
      } else {
        average.MoveRows(threads, sorted[i], /*is_step=*/!decays.empty());
      }
    }
  }
  return absl::OkStatus();
}

// Reads the operands of a call on a GPU: their memory is the device's.
absl::Status ReadGpuUpdate(Operands* operands, std::string_view rule_name,
                           gpu::Update* update) {
  const auto address = [](const void* data) {
    return reinterpret_cast<gpu::Address>(data);
  };
  size_t states = 0, scalars = 1;
  if (!rule_name.empty()) {
    const RuleInfo* rule;
    TF_RETURN_IF_ERROR(
        FindUpdate({rule_name.data(), rule_name.size()}, &rule));
    update->rule = rule->id;
    states = CountNames(rule->states);
    scalars = CountNames(rule->scalars);
    update->scalars.resize(scalars);
  }
  update->accept = address(operands->Bool());
  const absl::Span<const double> numbers = operands->Doubles();
  update->numbers = address(numbers.data());
  TF_RETURN_IF_ERROR(operands->status());
  const size_t averages = numbers.size() - scalars;
  const size_t n = operands->left() / (states + averages + 1);
  std::vector<Arrays> arrays;
  for (size_t a = 0; a < states + averages; ++a) {
    arrays.push_back(operands->Written(n));
  }
  const Arrays inputs = operands->Read(n);
  arrays.insert(arrays.begin() + states, inputs);
  TF_RETURN_IF_ERROR(operands->status());
  update->state = arrays[0].number;
  update->input = inputs.number;
  update->is_double = inputs.number == Number::kDouble;
  if (!update->rule.has_value()) update->sources = {{1, inputs.number}};
  update->arrays = arrays.size();
  for (size_t a = states + 1; a < arrays.size(); ++a) {
    update->targets.push_back({0, arrays[a].number});
  }
  for (size_t i = 0; i < n; ++i) {
    update->elements.push_back(inputs.elements(i));
    for (const Arrays& of_all : arrays) {
      update->addresses.push_back(address(of_all[i]));
    }
  }
  return absl::OkStatus();
}

ffi::Error ToError(const absl::Status& status) {
  if (status.ok()) return ffi::Error::Success();
  return ffi::Error(static_cast<ffi::ErrorCode>(status.code()),
                    std::string(status.message()));
}

// Enqueues an update. Before this, XLA calls it for the stage kInitialize,
// outside of a capture: then it loads kernels.
template <ffi::ExecutionStage stage>
ffi::Error RunOnGpu(gpu::Stream stream, ffi::RemainingArgs args,
                    ffi::RemainingRets results, std::string_view rule) {
  Operands operands(args, results);
  gpu::Update update;
  absl::Status status = ReadGpuUpdate(&operands, rule, &update);
  if (status.ok()) {
    const std::string error = stage == ffi::ExecutionStage::kExecute
                                  ? gpu::Enqueue(update, stream)
                                  : gpu::LoadForProgram(update);
    if (!error.empty()) {
      status = absl::InternalError(absl::StrCat(
          kGpuUpdateCall, " could not run on the GPU: ", error));
    }
  }
  return ToError(status);
}

// Calls a handler as XLA does, and returns its error.
template <auto kernel, class... Attributes>
ffi::Error Run(ffi::ThreadPool pool, ffi::RemainingArgs args,
               ffi::RemainingRets results, Attributes... attributes) {
  Operands operands(args, results);
  return ToError(kernel(ProgramThreads(&pool), &operands, attributes...));
}

// The arguments that XLA passes to each handler.
auto Bind() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::ThreadPool>()
      .RemainingArgs()
      .RemainingRets();
}

XLA_FFI_DEFINE_HANDLER(kApply, (Run<Apply, std::string_view>),
                       Bind().Attr<std::string_view>("rule"));
XLA_FFI_DEFINE_HANDLER(kSparseApply,
                       (Run<SparseApply, std::string_view, std::string_view>),
                       Bind()
                           .Attr<std::string_view>("rule")
                           .Attr<std::string_view>("names"));
XLA_FFI_DEFINE_HANDLER(kEmaUpdate, Run<EmaUpdate>, Bind());
XLA_FFI_DEFINE_HANDLER(kMoveRows, (Run<MoveRows, int64_t, std::string_view>),
                       Bind()
                           .Attr<int64_t>("n")
                           .Attr<std::string_view>("names"));

template <ffi::ExecutionStage stage>
auto BindOnGpu() {
  return ffi::Ffi::Bind<stage>()
      .template Ctx<ffi::PlatformStream<gpu::Stream>>()
      .RemainingArgs()
      .RemainingRets()
      .template Attr<std::string_view>("rule");
}

XLA_FFI_DEFINE_HANDLER(kGpuInitialize,
                       RunOnGpu<ffi::ExecutionStage::kInitialize>,
                       BindOnGpu<ffi::ExecutionStage::kInitialize>());
// A CUDA graph may capture it: it only launches.
XLA_FFI_DEFINE_HANDLER(kGpuExecute, RunOnGpu<ffi::ExecutionStage::kExecute>,
                       BindOnGpu<ffi::ExecutionStage::kExecute>(),
                       {ffi::Traits::kCmdBufferCompatible});

void Register(const char* name, XLA_FFI_Handler* handler,
              const char* platform = "Host",
              XLA_FFI_Handler* initialize = nullptr) {
  const XLA_FFI_Api* const api = ffi::GetXlaFfiApi();
  XLA_FFI_Error* const error = ffi::Ffi::RegisterStaticHandler(
      api, name, platform,
      XLA_FFI_Handler_Bundle{nullptr, nullptr, initialize, handler});
  if (error == nullptr) return;
  LOG(ERROR) << "XLA cannot call " << name << ": "
             << ffi::internal::GetErrorMessage(api, error);
  ffi::internal::DestroyError(api, error);
}

const bool handlers_registered = [] {
  Register(kApplyCall, kApply);
  Register(kSparseApplyCall, kSparseApply);
  Register(kEmaUpdateCall, kEmaUpdate);
  Register(kMoveRowsCall, kMoveRows);
  Register(kGpuUpdateCall, kGpuExecute, "CUDA", kGpuInitialize);
  return true;
}();

}  // namespace
}  // namespace wrapopt
