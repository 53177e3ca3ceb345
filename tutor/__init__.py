"""Exercises: a copy of a phase's package without the bodies of its main methods, judged by the phase's tests.

```text
make learn PHASE=6     phase6_paged/            copied, without the bodies of the main methods
                         └─> learn/phase6/phase6_paged/
make check PHASE=6     tests/phase6_paged/      run with the copy in place of the real package
                         └─> tests that pass, tests that fail, methods not written yet, and a hint
```

`learn.toml`, beside each phase's tests, lists the emptied methods, the tests of each idea, and the hints.
"""
