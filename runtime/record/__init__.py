"""The recording of what an engine did: requests, outputs and tapped values."""
