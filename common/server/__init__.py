"""The HTTP server. Begin with the walk of a request through it, from socket to socket.

```text
 1  http/connections        a connection, with bounds on its number, its time and the pieces of a body
 2  http/middleware         counts answers, names the request, checks the API key (without keys: the `Host`)
 3  routes                  `JsonRoute` has the body read and checked for the endpoint's function
 4  api/bodies              bytes become a checked body, or one error
 5  api/chat                the endpoint (or `completions`, `messages`, `responses`): its fields; calls `generate`
    routes                  `generate` leads the request through all that follows
 6  api/intake              compiles the grammar, holds places in the queue, makes the prompt and tokenizes it
    api/conversation        messages become the prompt's text
 7  hosting/async_engine    submits the requests, and keeps a stream of outputs for each
 8  hosting/process         carries messages to the engine's process and back
 9  hosting/child           takes the messages between two steps, and steps as long as there is work
10  engine/engine           one step after another: `common.engine` has the walk of a token through a step
    hosting/async_engine    makes the text of each output, and puts it into its request's stream
11  api/answer              takes the outputs of all choices as they come
    api/parts               cuts them into text, thoughts and tool calls
    api/chat                writes an event of the stream, or the whole JSON answer
12  api/stream              sends the events until the answer ends or the client leaves
```

The server's modules import each other in one direction only (an import contract in `pyproject.toml`).

Modules beside this path:

| module | holds |
| --- | --- |
| `run`, `options` | the command: signals, draining, exit code; flags, environment, `--help` |
| `app` | the app: middleware, routes and error handlers put around an engine |
| `service` | the objects that all routes share |
| `state` | the routes that make no text: models, health, telemetry, traces, administration |
| `api/lanes` | the threads for long work: compiling, tokenizing, encoding |
| `api/wanted` | the fields that ask for text |
| `api/tools`, `api/tokens` | tools of a body; tokenizing without an answer |
| `api/response_items`, `api/logprobs` | items of responses, and their store; log-probabilities |
| `http/sockets` | listening; limits of the operating system |
| `errors` | the JSON shape of errors, and their statuses |
| `logs`, `metrics` | lines of the log; numbers for Prometheus |
| `page/` | the web page at `/`; steps and traces of the running engine; `viewer/` draws the steps |
"""
