"""Checks and measurements on one GPU: `make gpu-check`, `make gpu-bench PART=a`."""
