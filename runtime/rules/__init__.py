"""Rules of sampling that depend on the tokens so far: words that may not come, and repetitions."""
