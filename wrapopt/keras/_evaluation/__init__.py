"""How averages are put in place of the weights, and evaluated."""
