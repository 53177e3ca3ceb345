"""The tests of a server's API, run against a cluster: it behaves like a server."""
