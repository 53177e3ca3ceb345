"""`tests.server.test_stored_responses`, against a cluster: a request finds the replica that stored a response."""

import pytest

from tests.server.test_stored_responses import *  # noqa: F403

pytestmark = pytest.mark.cluster
