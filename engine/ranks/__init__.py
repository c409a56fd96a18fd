"""Ranks in processes of their own: the executor that starts them, and what goes between the two."""
