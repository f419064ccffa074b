"""Weights that a checkpoint stores quantised: each format's tensors, read into one form."""
