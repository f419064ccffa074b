"""Tokens to text and back, by the files of a model folder."""
