"""Answers of a given form: which tokens may come next, so that an answer fits a schema, a regex or a tool.

Begin with `grammar`: a compiler turns a grammar into a matcher, which gives a mask of the allowed tokens before
each token is sampled. `tool_calls` writes the grammar of the functions that a request names.
"""
