"""The models of a server and the requests at work on them."""
