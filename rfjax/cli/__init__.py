"""The command line, `rfjax`: one module for each command. Importing it, and refusing bad options, needs no JAX."""

from rfjax.cli.main import main

__all__ = ["main"]
