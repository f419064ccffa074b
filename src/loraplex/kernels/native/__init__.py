"""The CPU kernels in C++ (native/ in the repository), called through a plain C ABI."""
