"""From options to an engine.

Begin with `build`: it loads the model and makes the pool, the scheduler and the runner of a phase, which
`phases` finds by name. `sizing` and `memory` choose and check sizes before the weights are read, and `warm_up`
runs the first passes.
"""
