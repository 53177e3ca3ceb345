"""A cluster has the same documents as a server. (The fuzzer runs in the server's own tests.)"""

import pytest

from tests.server.test_openapi import test_every_status_and_the_stream_are_documented  # noqa: F401

pytestmark = pytest.mark.cluster
