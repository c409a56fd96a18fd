"""How linear layers keep their weights: plain today. None of them knows a model."""
