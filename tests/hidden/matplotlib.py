"""Stands for a package that is not installed: see BUILD."""

raise ImportError(f"{__name__} is hidden by {__file__}")
