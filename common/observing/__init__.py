"""What an engine did, for people to look at. Both kinds of trace watch an engine from outside, and change nothing.

Begin with `frames`, which the viewer draws: for each step, who ran and who held which memory. `trace` writes
times of requests and steps in Chrome's format.
"""
