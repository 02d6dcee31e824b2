// TensorFlow wants these libraries to be there before it looks for a GPU.
extern "C" const int wrapopt_fake_gpu_empty = 0;
