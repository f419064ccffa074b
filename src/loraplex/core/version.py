"""The version of loraplex, by itself so that every room may tell it."""

__version__ = "0.1.0"
