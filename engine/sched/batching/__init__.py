"""Which requests wait, which run, and how much of them fits into a step."""
