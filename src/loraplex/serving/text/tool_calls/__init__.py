"""Tool calls in a model's text: one way of writing them per family, read as they come, and the
grammar that keeps a model to it."""
