"""KV events for those who route by them."""
