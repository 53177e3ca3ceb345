"""The HTTP server. A request goes through these modules once, from top to bottom.

`connections` and `routes` put the others together. The others import each other in one direction only, which an
import contract in `pyproject.toml` checks.

```text
socket    connections   how many clients there are, and how long each may take
request   middleware    ids, keys, names that the server answers to
parse     routes        one function for each route; `generate` for the routes that make text
          bodies        bytes to a checked body (`requests/`: its fields), or one error
tokens    intake        grammar compiled, places in the queue held, prompt tokenized
inbox     common.worker the engine's thread takes the requests from it, into `Scheduler.waiting`
step      common.engine
text      replies/      `answer`: outputs of all choices as they come
event                   `formats`: an event of a stream, or the JSON answer (`shapes`: its objects)
socket    stream        events that the client has not read yet, and clients that leave
```

Beside this way:

| module | holds |
| --- | --- |
| `app` | the app: middleware, routes and error handlers put around an engine |
| `service` | the objects that all routes share |
| `serve`, `options` | the command: port, signals, draining; flags, environment, `--help` |
| `errors` | one JSON shape for all errors, and their statuses |
| `openapi` | the OpenAPI document |
| `logs`, `metrics` | lines of the log; numbers for Prometheus |
| `live_view` | steps and traces of the running engine |
| `page` | the form at `/`; `viewer/` draws the steps |
"""
