"""The scheduler, which decides how many tokens of which sequences the next step computes."""
