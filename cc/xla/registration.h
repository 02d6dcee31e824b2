// Registers an XLA kernel, also if the library is loaded late.
//
// TensorFlow turns the registrations of REGISTER_XLA_OP into kernels once per
// process: at XLA's first compilation. An op of a library that is loaded later,
// such as after the first tf.function(jit_compile=True), would have no kernel:
// "No registered 'X' OpKernel for XLA_CPU_JIT devices".
#ifndef WRAPOPT_CC_XLA_REGISTRATION_H_
#define WRAPOPT_CC_XLA_REGISTRATION_H_

#include <string>

#include "tensorflow/compiler/tf2xla/xla_op_registry.h"
#include "tensorflow/core/framework/kernel_def_builder.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace wrapopt {

// Whether TensorFlow has made its kernels, such as that of MatMul for CPU.
inline bool XlaKernelsAreMade() {
  const tensorflow::KernelList kernels =
      tensorflow::GetRegisteredKernelsForOp("MatMul");
  for (const auto& kernel : kernels.kernel()) {
    if (kernel.device_type() == tensorflow::DEVICE_CPU_XLA_JIT) return true;
  }
  return false;
}

// Registers `Op` for all types: the op's attributes allow only those that all
// devices support.
template <class Op>
bool RegisterXlaKernel(const std::string& name) {
  constexpr auto make = [](tensorflow::OpKernelConstruction* ctx)
      -> tensorflow::OpKernel* { return new Op(ctx); };
  static const bool made = XlaKernelsAreMade();
  // Never deleted, like every registration. This one makes the op compilable.
  new tensorflow::XlaOpRegistrar(
      tensorflow::XlaOpRegistrationBuilder::Name(name).Build(make));
  if (!made) return true;
  for (const std::string& device :
       tensorflow::XlaOpRegistry::BackendNames()) {
    new tensorflow::kernel_factory::OpKernelRegistrar(
        tensorflow::KernelDefBuilder(name.c_str())
            .Device(device.c_str())
            .Build(),
        name, make);
  }
  return true;
}

}  // namespace wrapopt

#endif  // WRAPOPT_CC_XLA_REGISTRATION_H_
