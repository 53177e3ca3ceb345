"""The endpoints that take a body: one file has an endpoint's body, its answer and its routes.

Begin with `completions`, the simplest. Endpoints share `wanted` and `conversation` (fields of bodies), `intake`
(from a body to queued requests) and `answer` (from outputs to events).
"""
