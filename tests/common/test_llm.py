"""`generate()`, the reference, and `LLM`, the offline API, with any phase's engine."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from common.engine.reference import generate
from common.errors import InvalidRequestError, NaNLogitsError
from common.llm import LLM, Completion
from common.models.layers import CausalLM
from common.request import Request
from common.text.tokenizer import IncrementalDetokenizer
from tests.support.engines import (
    ALLERGEN,
    RememberingModel,
    build,
    byte_tokenizer,
    continuation,
    greedy,
    llm_of,
    nan_model,
    solo,
)
from tests.support.models import refusal_of, solo_logits

PHASES = ("static", "continuous")


# ---------------------------------------------------------------------- generate


def test_generate_raises_where_the_model_gives_no_number() -> None:
    with pytest.raises(NaNLogitsError):
        solo(nan_model(), [ALLERGEN], greedy(4))


# ---------------------------------------------------------------------- LLM


@pytest.fixture(params=PHASES)
def llm(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> LLM:
    return llm_of(build(request.param), monkeypatch)


CONTINUOUS = pytest.mark.parametrize("llm", ["continuous"], indirect=True)


def test_answers_come_in_the_prompts_order(llm: LLM) -> None:
    prompts = ["one", [116, 119, 111], "three", "4"]
    params = [greedy(3), greedy(9), greedy(1), greedy(5)]
    answers = llm.generate(prompts, params, progress=False)
    for prompt, each, answer in zip(prompts, params, answers, strict=True):
        ids = list(prompt.encode()) if isinstance(prompt, str) else prompt
        assert answer.prompt == prompt
        detokenizer = IncrementalDetokenizer(byte_tokenizer(), ids)
        assert answer.text == "".join(map(detokenizer.add, continuation(ids, each.max_new_tokens)))
        assert (answer.finish_reason, answer.error) == ("length", None)
        assert (answer.prompt_tokens, answer.completion_tokens) == (len(ids), each.max_new_tokens)


def test_a_prompt_that_cannot_be_served_stops_all_before_anything_runs(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError):
        llm.generate(["fine", "x" * 100], greedy(2), progress=False)
    assert llm.engine.telemetry.counters.requests_added == 0
    with pytest.raises(ValueError, match="1 params for 2 prompts"):
        llm.generate(["a", "b"], [greedy(1)], progress=False)


@CONTINUOUS
@pytest.mark.parametrize(
    "as_ids", [np.array, torch.tensor, lambda ids: [np.int64(each) for each in ids], tuple]
)
def test_token_ids_may_be_an_array_or_a_tensor(llm: LLM, as_ids: Callable[[list[int]], Any]) -> None:
    for prompts in (as_ids([116, 119]), [as_ids([116, 119])], iter([as_ids([116, 119])])):
        (answer,) = llm.generate(prompts, greedy(3), progress=False)
        assert list(answer.prompt) == [116, 119]
        assert answer.token_ids == continuation([116, 119], 3)


@CONTINUOUS
@pytest.mark.parametrize(
    ("prompts", "says"),
    [
        (None, "not NoneType"),
        (7, "not int: 7"),
        (b"ab", "not bytes"),
        ([1.5, 2.5], "not float: 1.5"),
        ([True, False], r"not list: \[True, False\]"),
        ({"prompt_token_ids": [5]}, "not dict"),
        (["fine", {"prompt": "x"}], "not dict: {'prompt': 'x'}"),
        ([["a", "b"]], "not list"),
        (["a\ud83d"], "surrogates not allowed"),
    ],
)
def test_what_is_no_prompt_is_refused(llm: LLM, prompts: Any, says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says):
        llm.generate(prompts, greedy(2), progress=False)
    assert not llm.engine.has_work


@CONTINUOUS
def test_a_request_that_fails_is_an_answer_with_its_error(llm: LLM) -> None:
    def before_pass(sequences: list[list[int]]) -> None:
        if any(ids[0] == ord("!") for ids in sequences):
            raise RuntimeError("boom")

    assert isinstance(llm.engine.runner.model, RememberingModel)
    llm.engine.runner.model.before_pass = before_pass
    fine, failed = llm.generate(["fine", "!"], greedy(2), progress=False)
    assert (fine.error, fine.completion_tokens) == (None, 2)
    assert str(failed.error) == "boom"


def test_the_tokens_of_an_answer_and_their_logprobs_where_asked_for(llm: LLM) -> None:
    params = [greedy(3), greedy(5, logprobs=0), greedy(4, logprobs=2)]
    silent, alone, ranked = llm.generate(["one", "two", "three"], params, progress=False)
    for answer, each in ((silent, params[0]), (alone, params[1]), (ranked, params[2])):
        assert answer.token_ids == continuation(list(answer.prompt.encode()), each.max_new_tokens)
        assert len(answer.token_ids) == answer.completion_tokens
    assert silent.logprobs is None
    assert [entry.top for entry in alone.logprobs] == [()] * 5
    assert [len(entry.top) for entry in ranked.logprobs] == [2] * 4
    for token_id, entry in zip(ranked.token_ids, ranked.logprobs, strict=True):
        assert entry.top[0] == (token_id, entry.logprob)


def test_the_logprobs_of_a_prompts_own_tokens(llama: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """`LLM` and `generate()` report the log-probabilities of the prompt's tokens."""
    llm = llm_of(build("continuous", llama), monkeypatch)
    params = [greedy(3, prompt_logprobs=2), greedy(3)]
    scored, silent = llm.generate([[5, 3, 250, 7], [5, 3]], params, progress=False)
    assert silent.prompt_logprobs is None
    assert [len(entry.top) for entry in scored.prompt_logprobs] == [2] * 3
    request = Request("r", [5, 3, 250, 7], params[0])
    first, *later = generate(llama, request)
    assert all(output.prompt_logprobs is None for output in later)
    for own, served in zip(first.prompt_logprobs, scored.prompt_logprobs, strict=True):
        assert (own.rank, own.logprob) == (served.rank, pytest.approx(served.logprob, abs=1e-5))
    expected = solo_logits(llama, [5, 3, 250])[-1].log_softmax(dim=-1)[7].item()
    assert scored.prompt_logprobs[-1].logprob == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("native_kernels", [True, False])
def test_a_forked_process_computes_with_its_copy(native_kernels: bool) -> None:
    """As a pool of `multiprocessing` does on Linux. The thread that computes passes is not copied."""
    llm = LLM("zoo:llama-tiny", phase=9, dtype="float32", native_kernels=native_kernels)

    def text() -> str:
        return llm.generate("Once upon a time", greedy(8), progress=False)[0].text

    expected = text()
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # kills a process that hangs
        code = 1
        with contextlib.suppress(BaseException):
            code = int(text() != expected)
            del llm.engine
            gc.collect()
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert text() == expected


def test_a_second_thread_waits_for_the_first(llm: LLM) -> None:
    """Both threads get all their answers, and no pass computes sequences of both."""
    owners: list[set[str]] = []

    def before_pass(sequences: list[list[int]]) -> None:
        owners.append({chr(token_ids[0]) for token_ids in sequences})
        time.sleep(0.001)  # lets the other thread run

    assert isinstance(llm.engine.runner.model, RememberingModel)
    llm.engine.runner.model.before_pass = before_pass
    together = threading.Barrier(2)

    def generate(name: str) -> list[Completion]:
        together.wait()
        return llm.generate([f"{name}{i}" for i in range(12)], greedy(8), progress=False)

    with ThreadPoolExecutor(2) as threads:
        for name, answers in zip("AB", threads.map(generate, "AB"), strict=True):
            assert [answer.prompt for answer in answers] == [f"{name}{i}" for i in range(12)]
            for answer in answers:
                assert answer.token_ids == continuation(list(answer.prompt.encode()), 8)
                assert answer.finish_reason == "length"
    assert [names for names, _ in itertools.groupby(owners)] in ([{"A"}, {"B"}], [{"B"}, {"A"}])


@pytest.mark.parametrize("phase", [4, "4", "continuous", None])
def test_a_model_by_its_name(phase: int | str | None) -> None:
    options = {"dtype": "float32", "device": "cpu", "max_seq_len": 64, "max_batch_size": 2}
    made = LLM("zoo:llama-tiny", phase=phase, **options)
    answers = made.generate(["Once upon a time", "The little"], greedy(6), progress=True)
    for answer in answers:
        assert answer.error is None
        assert 1 <= answer.completion_tokens <= 6


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_batch_size": 0}, "max_batch_size: Input should be greater than or equal to 1, not 0"),
        ({"dtype": "int3"}, "dtype: Input should be 'auto', 'float32', 'bfloat16' or 'float16', not 'int3'"),
        (
            {"max_batchsize": 4},
            "phase7_chunked has no option max_batchsize; it has model, chat_template, escape_special_tokens, ",
        ),
        (
            {"use_chunked_prefill": False, "mixed_batches": False},
            "mixed_batches has no meaning without use_ch",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_wrong_option_is_one_line_that_names_it(options: dict[str, Any], says: str) -> None:
    assert refusal_of(lambda: LLM("zoo:llama-tiny", phase="chunked", **options)).startswith(says)
