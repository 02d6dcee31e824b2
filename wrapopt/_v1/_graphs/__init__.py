"""Branches, variables and sessions of graphs."""
