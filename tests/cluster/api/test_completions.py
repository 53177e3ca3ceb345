"""`tests.server.test_completions`, against a cluster."""

from tests.server.test_completions import *  # noqa: F403
