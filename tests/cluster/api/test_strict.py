"""`tests.server.test_strict`, against a cluster."""

from tests.server.test_strict import *  # noqa: F403
