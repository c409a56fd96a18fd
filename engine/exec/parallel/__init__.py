"""A model computed by several ranks: which part each one has, and what they say to each other."""
