"""Traces played to engines on a virtual clock."""
