"""Averages of weights, for the optimizers of TensorFlow 1 and of Keras."""

from wrapopt._averages import _registration

del _registration
