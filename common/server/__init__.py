"""The HTTP server: routes, wire formats, errors, and the command line."""
