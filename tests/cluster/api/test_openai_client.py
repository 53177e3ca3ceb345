"""`tests.server.test_openai_client`, against a cluster."""

import pytest

from tests.server.test_openai_client import *  # noqa: F403

pytestmark = pytest.mark.cluster
