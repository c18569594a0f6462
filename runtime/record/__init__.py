"""What an engine did, written down."""
