"""`tests.server.test_refusals`, against a cluster."""

import pytest

from tests.server.test_refusals import *  # noqa: F403

pytestmark = pytest.mark.cluster
