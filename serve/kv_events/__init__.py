"""The KV events of the engines, for routers that send requests to the server that has their prefix cached."""
