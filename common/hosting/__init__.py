"""Runs an engine in a process of its own, for the event loop of a server.

Begin with `async_engine`, which a server uses. `process` starts the other process, and `child` runs there, with a
table of its threads. `messages` go between both. `calls` are functions that run there between two steps. `local`:
the engine in this process. The threads of both processes stand in one table in `docs/one-token.md`.
"""
