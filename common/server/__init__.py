"""The HTTP server. A request goes through these modules once, from top to bottom.

From `bodies` to `stream`, the modules import each other in one direction only, which an import contract in
`pyproject.toml` checks.

```text
socket    http/connections  bounds on the number of connections, and on the time that each may take (`http/framing`:
                            the HTTP parser, with bounds on a head and on a body's pieces)
request   http/middleware   answers counted, request ids, API keys, allowed `Host` names
parse     routes            `JsonRoute` reads the body that an endpoint's function takes
          api/bodies        bytes to a validated body, or to one error (`api/fields`: fields that are not
                            implemented)
endpoint  api/completions, api/chat, api/messages, api/tokens, api/responses
                            each with its body, its answer and its routes (`api/wanted`, `api/conversation`: fields
                            that bodies share); `routes.generate` for those that make text
tokens    api/intake        grammar compiled, places in the queue held, prompt tokenized (`api/lanes`: the threads
                            for this work)
inbox     common.hosting    the engine's thread moves requests from the inbox to `Scheduler.waiting`
step      common.engine.engine
text      api/answer        outputs of all choices as they come (`api/parts`: answer, thoughts and tool calls, cut
                            from their text)
event     the endpoint      an event of a stream, or the JSON answer (`api/shapes`, `api/logprobs`: its objects)
socket    api/stream        events to the client, until the answer ends or the client leaves
```

Modules beside this path:

| module | holds |
| --- | --- |
| `run`, `options` | the command: signals, draining, exit code; flags, environment, `--help` |
| `app` | the app: middleware, routes and error handlers put around an engine |
| `service` | the objects that all routes share |
| `state` | the routes that make no text: models, health, telemetry, traces, administration |
| `http/sockets` | listening; limits of the operating system |
| `errors` | the JSON shape of errors, and their statuses |
| `openapi` | what the OpenAPI document says of answers |
| `logs`, `metrics` | lines of the log; numbers for Prometheus |
| `page/` | the web page at `/`; steps and traces of the running engine; `viewer/` draws the steps |
"""
