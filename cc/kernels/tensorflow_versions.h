// TensorFlow's internals that have other names in some of its versions.
#ifndef WRAPOPT_CC_KERNELS_TENSORFLOW_VERSIONS_H_
#define WRAPOPT_CC_KERNELS_TENSORFLOW_VERSIONS_H_

#if __has_include("xla/stream_executor/device_address.h")
#include "xla/stream_executor/device_address.h"
#else  // TensorFlow 2.20.
#include "xla/stream_executor/device_memory.h"
#endif

namespace wrapopt {

#if __has_include("xla/stream_executor/device_address.h")
using stream_executor::DeviceAddressBase;
#else
using DeviceAddressBase = stream_executor::DeviceMemoryBase;
#endif

}  // namespace wrapopt

#endif  // WRAPOPT_CC_KERNELS_TENSORFLOW_VERSIONS_H_
