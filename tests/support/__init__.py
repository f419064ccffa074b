"""Doubles and generators that only the tests and benchmarks use."""
