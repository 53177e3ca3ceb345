"""`tests.server.test_chat`, against a cluster."""

from tests.server.test_chat import *  # noqa: F403
