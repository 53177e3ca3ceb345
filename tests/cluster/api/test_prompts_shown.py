"""`tests.server.test_prompts_shown`, against a cluster."""

from tests.server.test_prompts_shown import *  # noqa: F403
