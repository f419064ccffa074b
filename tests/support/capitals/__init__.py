"""Training data and training of the shipped demo model of capitals."""
