"""The command line: the module `main`, and one module per command."""
