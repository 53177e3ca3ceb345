"""The HTTP server: what comes in goes through these modules once, from left to right.

```text
           body                engine's requests          outputs               bytes
client ───────> routes/ ───> intake ───> EngineWorker ───> answers ───> wire/ ───> transport ───> client
       middleware  │            │        (common.worker)      │            │
       ids, keys   │      schemas/ parsing: bytes to a     a stream's    a module for
                   │      checked body, or one error       events, or    each format
                   │                                       one JSON answer
                   └ generation   completions and chat, in one wire format or another
                     tokens       text to token ids and back
                     models       what is served
                     operation    health, version, telemetry, metrics, the page, its steps

service      what the routes share             errors       one JSON shape for all of them, and their statuses
app          routes, errors, life: the app     request_log  a line for each request
lifecycle    port, signals, draining           cli, options flags and environment
openapi      the machine's description         page         the form at /
metrics      what Prometheus reads             live_view    steps as they come; viewer/ draws them
```
"""
