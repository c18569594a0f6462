"""The launches of each node on a GPU, a module for each family of ops."""
