"""Programs: Python functions that append texts, generations and choices to a state, which an engine computes."""
