"""The wire formats: .proto files, and the modules generated from them."""
