"""The gRPC endpoint."""
