"""Bodies of requests: their fields, the checks of their values, and the engine's parameters that follow from them.

A field is implemented, or refused at any value but its neutral ones (`known_fields`). Unknown fields are refused.
Labels (`user`, `metadata`) change nothing and are accepted at any value.
"""
