"""The network: gRPC and HTTP endpoints over models."""
