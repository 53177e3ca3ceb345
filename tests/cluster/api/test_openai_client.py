"""`tests.server.test_openai_client`, against a cluster."""

from tests.server.test_openai_client import *  # noqa: F403
