"""The models of a server, and the requests that run on them."""
