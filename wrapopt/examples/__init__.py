"""Examples: `python -m wrapopt.examples.digits --help`."""
