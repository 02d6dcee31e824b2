"""What the gates of asynchronous training share, of TensorFlow 1 and of Keras."""
