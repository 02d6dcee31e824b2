"""The parts of gates that TensorFlow 1's and Keras's classes share."""
