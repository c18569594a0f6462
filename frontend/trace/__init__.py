"""Model code under torch.export: what is caught at module level, and what a trace would get wrong."""
