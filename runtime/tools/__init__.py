"""Tools that a model may call: what a request offers, the grammar of calls, and the calls of an answer."""
