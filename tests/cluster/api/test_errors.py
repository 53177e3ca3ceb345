"""`tests.server.test_errors`, against a cluster."""

import pytest

from tests.server.test_errors import *  # noqa: F403

pytestmark = pytest.mark.cluster
