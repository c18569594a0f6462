"""The reasoning of answers: read apart from what they say, counted, and what it leaves to the form of an answer."""
