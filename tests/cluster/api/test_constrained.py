"""`tests.server.test_constrained`, against a cluster."""

from tests.server.test_constrained import *  # noqa: F403
