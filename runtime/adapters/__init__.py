"""LoRA adapters at run time: reading them, arranging them for a compiled step, and keeping those that are loaded."""
