"""A cluster has every document a server has. (What is fuzzed is the server behind it, in its own tests.)"""

import pytest

from tests.server.test_openapi import test_every_status_and_the_stream_are_documented  # noqa: F401

pytestmark = pytest.mark.cluster
