"""`tests.clients.test_openai_python`, against a cluster."""

import pytest

from tests.clients.test_openai_python import *  # noqa: F403

pytestmark = pytest.mark.cluster
