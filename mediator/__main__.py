"""Runs the command line with ``python -m mediator``."""

from mediator.cli import main

main()
