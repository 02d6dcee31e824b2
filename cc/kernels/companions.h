// The companions of a variable, such as its gate: one for all workers, sessions
// and ops that use the variable.
#ifndef WRAPOPT_CC_KERNELS_COMPANIONS_H_
#define WRAPOPT_CC_KERNELS_COMPANIONS_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc/kernels/variables.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/resource_var.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/platform/mutex.h"
#include "tensorflow/core/platform/refcount.h"

namespace wrapopt {

template <class T>
class CompanionResource : public tensorflow::ResourceBase {
 public:
  std::string DebugString() const override { return "companion of a variable"; }

  // `variable` is nullptr for a ref variable, which lives as long as this.
  std::shared_ptr<T> Of(tensorflow::Var* variable) {
    tensorflow::mutex_lock lock(mu_);
    // The address of a deleted variable may be that of a new one.
    if (variable != nullptr && variable_.GetNewRef().get() != variable) {
      variable_ = tensorflow::core::WeakPtr<tensorflow::Var>(variable);
      companion_ = std::make_shared<T>();
    }
    return companion_;
  }

 private:
  tensorflow::mutex mu_;
  tensorflow::core::WeakPtr<tensorflow::Var> variable_ TF_GUARDED_BY(mu_);
  std::shared_ptr<T> companion_ TF_GUARDED_BY(mu_) = std::make_shared<T>();
};

// Finds the T of a variable, or makes it. A variable has one T for each `what`.
template <class T>
absl::Status FindCompanion(tensorflow::OpKernelContext* ctx,
                            const Variables& variables, int variable,
                            const std::string& what,
                            std::shared_ptr<T>* found) {
  using Resource = CompanionResource<T>;
  tensorflow::ResourceMgr* const resources = ctx->resource_manager();
  Resource* its = nullptr;
  TF_RETURN_IF_ERROR(resources->LookupOrCreate<Resource>(
      resources->default_container(),
      absl::StrCat("wrapopt ", what, " ",
                   reinterpret_cast<uintptr_t>(variables.Identity(variable))),
      &its, [](Resource** made) {
        *made = new Resource;
        return absl::OkStatus();
      }));
  const tensorflow::core::RefCountPtr<Resource> resource(its);
  *found = resource->Of(variables.resource(variable));
  return absl::OkStatus();
}

// Allocates an output that owns a new resource.
template <class Resource>
absl::Status MakeOwner(tensorflow::OpKernelContext* ctx, const char* output,
                       Resource** resource) {
  tensorflow::Tensor* handle;
  TF_RETURN_IF_ERROR(ctx->allocate_output(output, {}, &handle));
  *resource = new Resource;
  handle->scalar<tensorflow::ResourceHandle>()() =
      tensorflow::ResourceHandle::MakeRefCountingHandle(*resource,
                                                        ctx->device()->name());
  return absl::OkStatus();
}

}  // namespace wrapopt

#endif  // WRAPOPT_CC_KERNELS_COMPANIONS_H_
