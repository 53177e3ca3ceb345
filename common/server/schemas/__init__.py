"""The API's bodies: what requests hold, one module for each family of routes, and what answers hold.

Rule: a field is implemented, or refused at any value but its neutral one. Nothing is accepted and ignored.
"""
