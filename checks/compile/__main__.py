"""Runs the compile check; worker processes import this module again."""

import sys

from .check import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
