"""One run, two targets in alternation, and a sweep of rates."""
