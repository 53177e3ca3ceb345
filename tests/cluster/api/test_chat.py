"""`tests.server.test_chat`, against a cluster."""

import pytest

from tests.server.test_chat import *  # noqa: F403

pytestmark = pytest.mark.cluster
