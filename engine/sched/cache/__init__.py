"""The blocks: pool, prefix cache, the tiers below it, and which block leaves each of them first."""
