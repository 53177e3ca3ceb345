"""`tests.server.test_tokens`, against a cluster."""

from tests.server.test_tokens import *  # noqa: F403
