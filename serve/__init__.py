"""The server, which offers models over gRPC and HTTP."""
