// Registers kernels, for CPU alone or for CPU and GPU.
#ifndef WRAPOPT_CC_KERNELS_REGISTRATION_H_
#define WRAPOPT_CC_KERNELS_REGISTRATION_H_

#include <string>
#include <vector>

#include "tensorflow/core/framework/kernel_def_builder.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/types.h"

// A statement that registers the kernel of an op for CPU alone.
#define WRAPOPT_REGISTER_CPU(op, Kernel)                                      \
  REGISTER_KERNEL_BUILDER(Name("Wrapopt>" op).Device(tensorflow::DEVICE_CPU), \
                          Kernel)

namespace wrapopt {

// Registers the kernel of an op for both devices. On a GPU, the inputs and
// outputs `on_host` are in host memory. Returns true, for a static variable.
inline bool RegisterKernel(
    const std::string& op, const std::vector<std::string>& on_host,
    tensorflow::OpKernel* (*make)(tensorflow::OpKernelConstruction*)) {
  for (const char* device : {tensorflow::DEVICE_CPU, tensorflow::DEVICE_GPU}) {
    tensorflow::KernelDefBuilder kernel(op.c_str());
    kernel.Device(device);
    if (device == tensorflow::DEVICE_GPU) {
      for (const std::string& name : on_host) kernel.HostMemory(name.c_str());
    }
    // Never deleted, like every registration.
    new tensorflow::kernel_factory::OpKernelRegistrar(kernel.Build(), op, make);
  }
  return true;
}

template <class Op>
bool RegisterKernel(const std::string& op,
                    const std::vector<std::string>& on_host) {
  return RegisterKernel(
      op, on_host,
      [](tensorflow::OpKernelConstruction* ctx) -> tensorflow::OpKernel* {
        return new Op(ctx);
      });
}

}  // namespace wrapopt

#endif  // WRAPOPT_CC_KERNELS_REGISTRATION_H_
