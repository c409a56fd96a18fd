"""The runner's path over Triton kernels: on a GPU, and in tests on the CPU through Triton's interpreter."""
