"""What the gates of both halves share, of TensorFlow 1 and of Keras."""
