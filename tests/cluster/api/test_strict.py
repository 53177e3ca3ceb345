"""`tests.server.test_strict`, against a cluster."""

import pytest

from tests.server.test_strict import *  # noqa: F403

pytestmark = pytest.mark.cluster
