"""`tests.server.test_constrained`, against a cluster."""

import pytest

from tests.server.test_constrained import *  # noqa: F403

pytestmark = pytest.mark.cluster
