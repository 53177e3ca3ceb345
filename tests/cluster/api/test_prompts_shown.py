"""`tests.server.test_prompts_shown`, against a cluster."""

import pytest

from tests.server.test_prompts_shown import *  # noqa: F403

pytestmark = pytest.mark.cluster
