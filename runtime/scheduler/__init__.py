"""Who computes how many tokens in the next step."""
