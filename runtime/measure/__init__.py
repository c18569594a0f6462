"""What an artifact is measured by: speed, perplexity, profiles, replays."""
