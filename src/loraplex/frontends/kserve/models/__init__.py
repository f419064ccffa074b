"""The Triton models that we serve, and how their tensors become requests and outputs."""
