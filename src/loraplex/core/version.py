"""Version of loraplex, in a file of its own so that every package can import it."""

__version__ = "0.1.0"
