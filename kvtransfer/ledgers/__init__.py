"""Who owns each slab: the pure ledgers of publishing and reading, and what carries out their actions."""
