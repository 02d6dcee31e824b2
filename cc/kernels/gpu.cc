#include "cc/kernels/gpu.h"

#include <string>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "cc/kernels/tensorflow_versions.h"
#include "xla/stream_executor/stream.h"

namespace wrapopt {
namespace {

using tensorflow::OpKernelContext;
using tensorflow::Tensor;

DeviceAddressBase Buffer(const Tensor& tensor) {
  return DeviceAddressBase(tensor.data(), tensor.TotalBytes());
}

template <class Work>
absl::Status Enqueue(OpKernelContext* ctx, const Work& work) {
  const auto stream = static_cast<gpu::Stream>(
      ctx->op_device_context()->stream()->platform_specific_handle().stream);
  const std::string error = gpu::Enqueue(work, stream);
  if (error.empty()) return absl::OkStatus();
  return absl::InternalError(absl::StrCat(
      ctx->op_kernel().type_string(), " could not run on the GPU: ", error));
}

}  // namespace

bool IsOnGpu(OpKernelContext* ctx) {
  return ctx->op_device_context() != nullptr &&
         ctx->op_device_context()->stream() != nullptr;
}

absl::Status CopyOnGpu(OpKernelContext* ctx, const Tensor& from, Tensor* to) {
  if (from.TotalBytes() == 0) return absl::OkStatus();
  DeviceAddressBase buffer = Buffer(*to);
  return ctx->op_device_context()->stream()->Memcpy(&buffer, Buffer(from),
                                                    from.TotalBytes());
}

absl::Status ZeroOnGpu(OpKernelContext* ctx, Tensor* tensor) {
  if (tensor->TotalBytes() == 0) return absl::OkStatus();
  DeviceAddressBase buffer = Buffer(*tensor);
  return ctx->op_device_context()->stream()->MemZero(&buffer,
                                                     tensor->TotalBytes());
}

// A pass is the step of a rule or a weighted sum, then averages of what came
// out, or averages alone.
absl::Status RunPassOnGpu(OpKernelContext* ctx, const Pass& pass,
                          const LazyRows* lazy) {
  // Rows that lag behind may have to catch up.
  const auto is_idle = [lazy](const Pass::Stage& stage) {
    return lazy == nullptr && stage.is_idle();
  };
  if (pass.variables() == 0 || absl::c_all_of(pass.stages(), is_idle)) {
    return absl::OkStatus();
  }
  gpu::Update update;
  update.is_double = pass.stages().front().step.state == Number::kDouble;
  // Indices of the update's arrays among a variable's operands.
  std::vector<int> arrays, targets;
  int operand = 0;
  for (const Pass::Stage& stage : pass.stages()) {
    if (is_idle(stage)) {
      operand += stage.operands;
      continue;
    }
    const bool is_first = arrays.empty();
    switch (stage.step.rule) {
      case RuleId::kWeightedSum:
        update.sources.push_back({stage.scalars[0], stage.step.input});
        arrays.push_back(operand + 1);
        break;
      case RuleId::kEma:
        if (stage.scratch == 0) {
          return absl::UnimplementedError(
              "a GPU takes no averages in a scratch array");
        }
        if (is_first) {
          update.sources.push_back({1, stage.step.input});
          arrays.push_back(operand + 1);
        }
        update.targets.push_back({stage.scalars[0], stage.step.state});
        targets.push_back(operand);
        break;
      default:
        update.rule = stage.step.rule;
        update.state = stage.step.state;
        update.input = stage.step.input;
        update.scalars.assign(
            stage.scalars,
            stage.scalars + CountNames(Info(stage.step.rule).scalars));
        for (int i = 0; i < stage.operands; ++i) arrays.push_back(i);
    }
    operand += stage.operands;
  }
  arrays.insert(arrays.end(), targets.begin(), targets.end());
  const size_t log_decays = lazy == nullptr ? 0 : 2 * targets.size();
  if (lazy != nullptr) {
    update.row_elements = lazy->row_elements;
    update.is_step = lazy->is_step;
  }
  update.arrays = arrays.size() + log_decays;
  update.elements.reserve(pass.variables());
  update.addresses.reserve(pass.variables() * update.arrays);
  for (size_t i = 0; i < pass.variables(); ++i) {
    update.elements.push_back(pass.elements(i));
    for (const int array : arrays) {
      update.addresses.push_back(
          reinterpret_cast<gpu::Address>(pass.operands(i)[array]));
    }
    for (size_t l = i * log_decays; l < (i + 1) * log_decays; ++l) {
      update.addresses.push_back(
          reinterpret_cast<gpu::Address>(lazy->log_decays[l]));
    }
  }
  return Enqueue(ctx, update);
}

absl::Status MarkRowsOnGpu(OpKernelContext* ctx, const gpu::RowMarks& marks) {
  return Enqueue(ctx, marks);
}

absl::Status SumRowsOnGpu(OpKernelContext* ctx, const gpu::RowSum& sum) {
  return Enqueue(ctx, sum);
}

}  // namespace wrapopt
