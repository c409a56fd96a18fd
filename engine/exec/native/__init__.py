"""The CPU path through the compiled kernels of kernels/native."""
