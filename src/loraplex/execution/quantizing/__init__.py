"""Writes a model folder anew, with its linear layers quantised."""
