"""What every room shares: types, errors, clock, ids, block identity, configuration. Imports no other room."""
