"""Passes that fuse several ops into one, with one fusion per module."""
