"""The two loops of a placement decision in C, called through ctypes; numpy does the same without a compiler."""
