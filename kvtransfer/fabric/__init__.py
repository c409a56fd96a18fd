"""What transports have in common: their interface, their register, their peers and their self-tests."""
