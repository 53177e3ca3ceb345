"""What protects the sockets: bounds on connections, heads and bodies, before a request reaches a route.

Begin with `middleware`, which every request passes in the order of the file. `connections` counts connections
and limits their time and the pieces of a body, and `sockets` listens.
"""
