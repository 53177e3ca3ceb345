"""The HTTP server: what comes in goes through these modules once, from left to right.

```text
           body                engine's requests          outputs               bytes
client ───────> routes/ ───> intake ───> EngineWorker ───> answers ───> wire/ ───> transport ───> client
connections     │  bodies       │        (common.worker)      │            │       backlogs
middleware      │          schemas/ parsing: bytes to a    a stream's    a module   what was made
ids, keys       │          checked body, or one error      events, or    for each   and not taken
                │                                          one JSON      format
                │                                          answer
                └ generation   completions and chat, in one wire format or another
                  tokens       text to token ids and back
                  models       what is served
                  operation    health, version, telemetry, metrics, the page, its steps
                  tracing      what the engine does from now on

service      what the routes share             errors       one JSON shape for all of them, and their statuses
app          routes, errors, life: the app     request_log  a line for each request; log_format: as text or JSON
lifecycle    port, signals, draining           cli, options flags and environment
connections  how many, and for how long        page         the form at /
openapi      the machine's description         live_view    steps as they come, viewer/ draws them
metrics      what Prometheus reads             recordings   traces that clients ask for
parser       HTTP requests, in bounded turns   own_pages    strange names and other sites' pages, refused
lingering    a close that loses no answer      help         the text of --help
```
"""
