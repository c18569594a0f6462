"""Speculation: tokens are drafted and computed together, and those count that the model itself chooses."""
