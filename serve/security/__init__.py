"""Who may ask, and TLS."""
