"""JSON Schemas, rewritten into what xgrammar converts exactly."""
