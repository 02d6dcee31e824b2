"""Benchmarks: `python -m wrapopt.bench --help`."""
