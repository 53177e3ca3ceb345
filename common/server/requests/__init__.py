"""Bodies of requests: their fields, the checks of their values, and the engine's parameters that follow from them.

A field that is not implemented is refused if it would change the answer, or else ignored (`known_fields`). Labels
(`user`, `metadata`) do not change what is generated.
"""
