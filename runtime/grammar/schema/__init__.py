"""JSON Schemas, rewritten into what libraries of grammars hold to exactly."""
