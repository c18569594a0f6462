"""The artifact on disk: reading, checking and signing it."""
