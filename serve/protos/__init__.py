"""The wire formats: .proto files, and the modules made of them."""
