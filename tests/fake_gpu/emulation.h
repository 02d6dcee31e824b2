// The parts of CUDA C++ in the kernels' source, for a host compiler. The
// kernels use no shared memory, and after a barrier only the last thread
// writes, so threads can run one after another.
#ifndef WRAPOPT_TESTS_FAKE_GPU_EMULATION_H_
#define WRAPOPT_TESTS_FAKE_GPU_EMULATION_H_

namespace wrapopt {
namespace fake_gpu {

struct Index {
  unsigned x, y;
};

extern thread_local Index thread, block, grid;

}  // namespace fake_gpu
}  // namespace wrapopt

#define threadIdx (::wrapopt::fake_gpu::thread)
#define blockIdx (::wrapopt::fake_gpu::block)
#define gridDim (::wrapopt::fake_gpu::grid)

// The driver finds them by name, in its own library.
#define WRAPOPT_KERNEL(...) \
  extern "C" __attribute__((visibility("default"))) void __VA_ARGS__
#define WRAPOPT_DEVICE inline
#define WRAPOPT_BARRIER()
#define WRAPOPT_TABLE(type) const type&

#endif  // WRAPOPT_TESTS_FAKE_GPU_EMULATION_H_
