"""The gRPC endpoint of a server."""
