"""What is sent, and when: generated from a seed, or read from traces."""
