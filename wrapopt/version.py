"""The version of wrapopt, which the build and the wheel read here."""

__version__ = "0.1.0"
