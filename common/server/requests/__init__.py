"""Bodies of requests: their fields, the checks of their values, and the engine's parameters that follow from them.

A known field is either implemented, or accepted only at neutral values, which ask for nothing (`known_fields`).
Unknown fields are refused. Labels (`user`, `metadata`) do not change what is generated.
"""
