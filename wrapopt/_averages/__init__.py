"""Averages of weights, for the optimizers of TensorFlow 1 and of Keras."""
