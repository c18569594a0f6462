"""The playback of request traces to engines on a virtual clock."""
