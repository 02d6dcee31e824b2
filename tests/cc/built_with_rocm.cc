// A library to preload: a TensorFlow that says it was built for AMD's GPUs.
namespace tensorflow {

__attribute__((visibility("default"))) bool IsBuiltWithROCm() { return true; }

}  // namespace tensorflow
