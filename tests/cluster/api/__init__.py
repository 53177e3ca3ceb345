"""The tests of a server's API, against a cluster: clients cannot tell one from the other."""
