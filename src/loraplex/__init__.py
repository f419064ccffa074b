"""loraplex: one server for a base model and thousands of its LoRA adapters."""

__version__ = "0.1.0"

__all__ = ["__version__"]
