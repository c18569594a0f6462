"""Answers that are held to a form: grammars, compiled beside the engine, and the masks of each step."""
