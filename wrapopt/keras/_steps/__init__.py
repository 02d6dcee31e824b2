"""How a step of a Keras optimizer in wrappers is taken."""
