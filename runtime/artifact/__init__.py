"""An artifact on disk: read, checked, signed."""
