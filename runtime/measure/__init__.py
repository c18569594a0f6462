"""The measurements of an artifact: speed, perplexity, profiles and replays."""
