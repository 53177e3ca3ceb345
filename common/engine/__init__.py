"""The step of an engine: which requests compute, what their passes compute, and which tokens come of it.

Begin with `engine`: `Engine.step` is the same for every phase. A phase fills in a scheduler, a runner and a pool.
One token goes through a step from top to bottom:

```text
engine                 Engine.step        ended requests give back memory, waiting ones are admitted
scheduling             Scheduler.plan     the phase's scheduler puts the request into the step's plan
runner                 Runner.execute     the phase's runner makes passes of the plan
common.kv              KVPool.view        the phase's pool: which columns the pass reads and writes
common.models.layers   CausalLM.forward   the pass: logits of the request's latest token
common.sampling.draw   choose             the next token
commit                 commit_token       whether the request ends, and the token's text: an output
engine                 Engine.step        the outputs of the step, to whoever called it
```

From phase 9 on, a step launches its pass and returns the outputs of an earlier one. In a server, the event loop
makes the text (`common.hosting.async_engine`).

Beside this path: `requests` checks prompts and limits before a request is queued, `config` has the options that all
phases share, `telemetry` counts, `prompt_scores` scores a prompt's own tokens, and `reference` generates without a
scheduler: every phase must give its tokens.
"""
