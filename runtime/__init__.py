"""The runtime, which serves a compiled artifact with numpy and tokenizers, without torch."""
