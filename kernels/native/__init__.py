"""The decoder's layers in C for the CPU, in fp32: compiled where they run, called through ctypes."""
