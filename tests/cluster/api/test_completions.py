"""`tests.server.test_completions`, against a cluster."""

import pytest

from tests.server.test_completions import *  # noqa: F403

pytestmark = pytest.mark.cluster
