"""What tests share. pytest puts tests/support onto sys.path, and nothing else of the repository: other packages own the
names `kernels`, `proto` and `client`."""
