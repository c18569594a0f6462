"""Passes that spread a program over tensor-parallel, pipeline-parallel and expert-parallel ranks."""
