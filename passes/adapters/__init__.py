"""The passes that make room for LoRA adapters in a step."""
