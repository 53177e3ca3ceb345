"""`tests.server.test_responses`, against a cluster."""

import pytest

from tests.server.test_responses import *  # noqa: F403

pytestmark = pytest.mark.cluster
