"""One step on the device: its input tensors, its launch, and its results."""
