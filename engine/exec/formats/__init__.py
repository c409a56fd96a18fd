"""How checkpoints hold quantized linear layers: what their quantization_config means, and their tensors."""
