"""`tests.server.test_errors`, against a cluster."""

from tests.server.test_errors import *  # noqa: F403
