"""Ranks of one worker on several hosts: how the other hosts join its executor, and what goes over the network."""
