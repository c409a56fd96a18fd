"""Around any transport: encryption, and faults on command."""
