// TensorFlow requires these libraries before it looks for a GPU.
extern "C" const int wrapopt_fake_gpu_empty = 0;
