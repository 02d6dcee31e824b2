// Wrapopt>Bundle and Wrapopt>BundleByName: the handles of variables in one
// tensor.
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc/kernels/function_kernel.h"
#include "cc/kernels/registration.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_handle.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/resource_var.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tensorflow/core/framework/types.h"

namespace wrapopt {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::ResourceHandle;
using tensorflow::Tensor;

absl::Status ComputeBundle(OpKernelContext* ctx) {
  Tensor* handles;
  TF_RETURN_IF_ERROR(ctx->allocate_output(0, {ctx->num_inputs()}, &handles));
  auto to = handles->vec<ResourceHandle>();
  for (int i = 0; i < ctx->num_inputs(); ++i) {
    const Tensor& variable = ctx->input(i);
    if (variable.NumElements() != 1) {
      return absl::InvalidArgumentError(
          absl::StrCat("variables[", i, "] must be one resource handle, got a ",
                       "tensor of shape ", variable.shape().DebugString()));
    }
    to(i) = variable.flat<ResourceHandle>()(0);
  }
  return absl::OkStatus();
}

class BundleByNameOp : public OpKernel {
 public:
  explicit BundleByNameOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    std::vector<std::string> containers, names;
    std::vector<tensorflow::DataType> dtypes;
    std::vector<tensorflow::PartialTensorShape> shapes;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("containers", &containers));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("shared_names", &names));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("dtypes", &dtypes));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("shapes", &shapes));
    const size_t n = names.size();
    OP_REQUIRES(
        ctx, containers.size() == n && dtypes.size() == n && shapes.size() == n,
        absl::InvalidArgumentError(absl::StrCat(
            "containers, shared_names, dtypes and shapes must be of one ",
            "length, got ", containers.size(), ", ", n, ", ", dtypes.size(),
            " and ", shapes.size())));
    tensorflow::AllocatorAttributes on_host;
    on_host.set_on_host(true);
    OP_REQUIRES_OK(ctx, ctx->allocate_temp(
                            tensorflow::DT_RESOURCE,
                            tensorflow::TensorShape({static_cast<int64_t>(n)}),
                            &handles_, on_host));
    auto to = handles_.vec<ResourceHandle>();
    for (size_t i = 0; i < n; ++i) {
      OP_REQUIRES(ctx, !names[i].empty(),
                  absl::InvalidArgumentError(
                      absl::StrCat("shared_names[", i, "] must not be empty")));
      to(i) = tensorflow::MakeResourceHandle<tensorflow::Var>(
          ctx, containers[i], names[i],
          {tensorflow::DtypeAndPartialTensorShape{dtypes[i], shapes[i]}});
    }
  }

  void Compute(OpKernelContext* ctx) override { ctx->set_output(0, handles_); }
  bool IsExpensive() override { return false; }

 private:
  Tensor handles_;
};

const bool bundle_registered =
    RegisterKernel<FunctionKernel<ComputeBundle>>("Wrapopt>Bundle",
                                                  {"variables", "handles"}) &&
    RegisterKernel<BundleByNameOp>("Wrapopt>BundleByName", {"handles"});

}  // namespace
}  // namespace wrapopt
