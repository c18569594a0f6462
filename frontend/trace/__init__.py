"""The tracing of model code by torch.export, with the parts caught at module level that a trace would get wrong."""
