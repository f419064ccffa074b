"""Device code: Triton programs. Their launchers, with shapes and types, are one level up."""
