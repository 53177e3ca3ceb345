"""Commits sampled tokens on the host, the last stage of a step: detokenizes them and decides which requests end."""

from __future__ import annotations

from common.errors import NaNLogitsError, NoTokenLeftError
from common.request import FinishReason, Request, StepOutput, TokenLogprobs
from kernels import NOT_A_TOKEN


def commit_token(request: Request, token_id: int, logprobs: TokenLogprobs | None = None) -> StepOutput:
    """Append a sampled token to its request. Returns the step's output for the request.

    Raises:
        NaNLogitsError: `token_id` is `NOT_A_TOKEN`: no token could be sampled, since a logit was NaN, or all were
            minus infinity.
        NoTokenLeftError: `token_id` is `NOT_A_TOKEN`, and the request has `allowed_token_ids` or `bad_words`, which
            may have forbidden all tokens.
        GrammarFailedError: the request's grammar does not accept the token, or has failed.
    """
    if token_id == NOT_A_TOKEN and request.allowed is not None:
        raise NoTokenLeftError(
            "no token was left to sample: allowed_token_ids and bad_words, together with the answer's grammar and "
            "min_tokens, forbid all of them"
        )
    if token_id == NOT_A_TOKEN:
        raise NaNLogitsError("the model's output for this request was not a number")
    if request.matcher is not None:
        request.matcher.advance(token_id)
    request.token_ids.append(token_id)
    text, offset, reason = decode(request, token_id, _why_it_ends(request, token_id))
    if reason is not None:
        request.finish(reason)
    elif request.matcher is not None and not request.drafts.token_ids:
        request.matcher.begin_mask()  # computed while other rows are committed and the next pass runs
    generated = request.num_generated_tokens
    reports_prompt = request.params.prompt_logprobs is not None and generated == 1
    return StepOutput(
        request_id=request.request_id,
        token_id=token_id,
        text_delta=text,
        text_offset=offset,
        finished=reason is not None,
        finish_reason=reason,
        error=None,
        prompt_tokens=request.num_prompt_tokens,
        completion_tokens=generated,
        cached_tokens=request.cached_tokens,
        draft_tokens=request.drafts.guessed,
        accepted_tokens=request.drafts.accepted,
        logprobs=logprobs,
        prompt_logprobs=tuple(request.prompt_logprobs) if reports_prompt else None,
    )


def _why_it_ends(request: Request, token_id: int) -> FinishReason | None:
    """Return why a request ends with this token, judged by token ids alone; None: the request continues.

    The order of checks: EOS (or a stop token), complete grammar, length.
    """
    if token_id in request.ending_token_ids:
        return "stop" if token_id in request.params.stop_token_ids else "eos"
    if request.matcher is not None and request.matcher.complete:
        return "stop"
    return "length" if request.num_generated_tokens >= request.params.max_new_tokens else None


def decode(
    request: Request, token_id: int, reason: FinishReason | None
) -> tuple[str, int, FinishReason | None]:
    """Decode a token of an answer, and look for stop strings.

    If the text completes a stop string, the request ends for this reason, unless an EOS or stop token ends it.

    Args:
        request: the token's request. Only its detokenizer is changed.
        token_id: the token.
        reason: why the request ends, judged by token ids alone.

    Returns:
        The text to deliver with the token, the `text_offset` of its output, and why the request ends with it (None:
        the request continues).
    """
    detokenizer = request.detokenizer
    if detokenizer is None:
        return "", 0, reason
    offset = detokenizer.length
    ending = token_id in request.ending_token_ids
    shown = not ending or request.params.include_stop_str_in_output
    text = detokenizer.add(token_id) if shown else ""
    if detokenizer.stopped_by is not None and not ending:
        reason = "stop"
    if reason is not None:
        text += detokenizer.finish()
    return text, offset, reason


def fail(request: Request, error: Exception) -> StepOutput:
    """Move a request to FAILED. Returns its terminal output."""
    request.fail(without_frames(error))
    return terminal_output(request)


def without_frames(error: Exception) -> Exception:
    """Remove the tracebacks of an error and of the errors that led to it, and return the error. Log them first.

    Requests, outputs and completions keep their error, and a traceback's frames would keep a pass's tensors alive.
    """
    chain: list[BaseException] = [error]
    for link in chain:
        link.__traceback__ = None
        earlier = (link.__cause__, link.__context__)
        chain += [each for each in earlier if each is not None and each not in chain]
    return error


def terminal_output(request: Request) -> StepOutput:
    """Return a terminal output without a token: the request's finish reason, error and token counts."""
    return StepOutput(
        request_id=request.request_id,
        token_id=None,
        text_delta="",
        text_offset=0,
        finished=True,
        finish_reason=request.finish_reason,
        error=request.error,
        prompt_tokens=request.num_prompt_tokens,
        completion_tokens=request.num_generated_tokens,
        cached_tokens=request.cached_tokens,
        draft_tokens=request.drafts.guessed,
        accepted_tokens=request.drafts.accepted,
    )
