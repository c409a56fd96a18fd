"""What processes tell of themselves: logs, metrics, traces."""
