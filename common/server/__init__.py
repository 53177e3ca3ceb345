"""The HTTP server. A request goes through these modules once, from top to bottom.

`connections`, `middleware`, `routes` and `state_routes` connect the other modules. From `bodies` to `stream`, the
modules import each other in one direction only, which an import contract in `pyproject.toml` checks.

```text
socket    connections   bounds on the number of connections, and on the time that each may take (`framing`: the
                        HTTP parser, with bounds on a body's pieces)
request   middleware    request ids, API keys, allowed `Host` names
parse     routes        the functions of the routes; `generate` for the routes that make text
          bodies        bytes to a validated body (`requests/`: its fields; `fields`: those that are not
                        implemented), or to one error
tokens    intake        grammar compiled, places in the queue held, prompt tokenized
inbox     common.hosting.async_engine, common.hosting.thread
                        the engine's thread moves requests from the inbox to `Scheduler.waiting`
step      common.engine.engine
text      replies/      `answer`: outputs of all choices as they come
                        `parts`: answer, thoughts and tool calls, cut from that text
event                   `completions`, `chat`, `responses`: an event of a stream, or the JSON answer (`formats`:
                        code that completions and chat share; `shapes`, `logprobs`: the JSON objects)
socket    stream        bytes to the client, until the answer ends or the client leaves (`backlogs`: unread bytes)
```

Modules beside this path:

| module | holds |
| --- | --- |
| `app` | the app: middleware, routes and error handlers put around an engine |
| `api/` | endpoints that have body, answer and routes in one file: Anthropic's messages |
| `state_routes` | the routes that make no text: models, health, telemetry, traces, administration |
| `service` | the objects that all routes share |
| `serve`, `options` | the command: signals, draining, exit code; flags, environment, `--help` |
| `sockets` | listening; limits of the operating system; closing without a reset |
| `errors` | the JSON shape of errors, and their statuses |
| `openapi` | the OpenAPI document |
| `logs`, `metrics` | lines of the log; numbers for Prometheus |
| `live_view` | steps and traces of the running engine |
| `page` | the web page at `/`; `viewer/` draws the steps |
"""
