"""What runs a description: torch (the reference), Triton with CUDA graphs, and C compiled on this machine."""
