// Registers an XLA kernel, also in a library that is loaded late.
//
// TensorFlow makes kernels of the registrations of REGISTER_XLA_OP once in a
// process: when XLA first compiles something. An op of a library that is loaded
// after that, after the user's first tf.function(jit_compile=True) for example,
// would have no kernel: "No registered 'X' OpKernel for XLA_CPU_JIT devices".
#ifndef WRAPOPT_CC_KERNELS_REGISTRATION_XLA_H_
#define WRAPOPT_CC_KERNELS_REGISTRATION_XLA_H_

#include <string>

#include "tensorflow/compiler/tf2xla/xla_op_registry.h"
#include "tensorflow/core/framework/kernel_def_builder.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace wrapopt {

// Whether TensorFlow has made its kernels: MatMul's for CPU is one of them.
inline bool XlaKernelsAreMade() {
  const tensorflow::KernelList kernels =
      tensorflow::GetRegisteredKernelsForOp("MatMul");
  for (const auto& kernel : kernels.kernel()) {
    if (kernel.device_type() == tensorflow::DEVICE_CPU_XLA_JIT) return true;
  }
  return false;
}

// `name` and `factory` are for an op whose types all devices have.
inline void RegisterXlaKernel(
    const std::string& name,
    tensorflow::OpKernel* (*factory)(tensorflow::OpKernelConstruction*)) {
  static const bool made = XlaKernelsAreMade();
  // These live as long as the process, as every registration does. This one is
  // what says that an op can be compiled.
  new tensorflow::XlaOpRegistrar(
      tensorflow::XlaOpRegistrationBuilder::Name(name).Build(factory));
  if (!made) return;
  for (const std::string& device :
       tensorflow::XlaOpRegistry::BackendNames()) {
    new tensorflow::kernel_factory::OpKernelRegistrar(
        tensorflow::KernelDefBuilder(name.c_str())
            .Device(device.c_str())
            .Build(),
        name, factory);
  }
}

}  // namespace wrapopt

#endif  // WRAPOPT_CC_KERNELS_REGISTRATION_XLA_H_
