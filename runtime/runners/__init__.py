"""The runners that execute steps: one folder per kind of target."""
