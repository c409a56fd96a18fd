"""LoRA adapters as files: what they are, and which are served."""
