"""The version; the build and the wheel take it from here."""

__version__ = "0.1.0"
