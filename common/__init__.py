"""Types shared by all packages: errors, clock, ids, block identity, configuration. Imports no other package."""
