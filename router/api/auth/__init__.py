"""Who calls: API keys, and what the key's tenant may use in a minute."""
