"""`tests.server.test_tokens`, against a cluster."""

import pytest

from tests.server.test_tokens import *  # noqa: F403

pytestmark = pytest.mark.cluster
