"""Bodies of requests: the fields, their checks, and what they ask of the engine. One module for each family of routes.

A field is implemented, or refused at any value but its neutral ones (`known_fields`). Unknown fields are refused.
Labels (`user`, `metadata`) change nothing and are accepted at any value.
"""
