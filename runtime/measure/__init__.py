"""The measurements of an artifact: speed, perplexity, profiles, replays, and the histogram of measured values."""
