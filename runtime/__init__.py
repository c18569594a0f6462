"""An artifact at work: numpy and tokenizers, no torch."""
