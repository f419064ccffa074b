"""Base weights: read from disk, packed for a backend, kept in the weights cache."""
