"""The tests of a server's API, against a cluster: clients cannot tell one from the other."""

# ruff: noqa: F403 - each module's tests, collected here, with this folder's `server`

from tests.server.test_chat import *
from tests.server.test_completions import *
from tests.server.test_constrained import *
from tests.server.test_errors import *
from tests.server.test_openai_client import *
from tests.server.test_openapi import test_every_status_and_the_stream_are_documented
from tests.server.test_prompts_shown import *
from tests.server.test_strict import *
from tests.server.test_tokens import *
