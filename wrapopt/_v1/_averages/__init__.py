"""How averages are kept in slots."""
