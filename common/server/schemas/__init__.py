"""The API's bodies: what requests hold, one module for each family of routes, and what answers hold.

Rule: a field is implemented, or refused at any value but its neutral ones (`unimplemented`). Unknown fields are
refused. Labels alone change nothing and are accepted at any value.
"""
