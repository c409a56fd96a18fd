"""A request inside the scheduler, its output, and the sequences of its choices and beams."""
