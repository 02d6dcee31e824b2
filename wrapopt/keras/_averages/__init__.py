"""How averages are kept in variables of Keras."""
