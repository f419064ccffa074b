"""The backend of a GPU. The kernels are Triton's; their programs lie in `programs`."""
