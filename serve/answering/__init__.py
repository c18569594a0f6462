"""The work on generating requests that the HTTP and the gRPC interface share, between their edges and the models."""
