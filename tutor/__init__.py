"""Exercises of the size of a phase's idea: the phase's own package, emptied, and its own tests as the judge.

```text
make learn PHASE=6     phase6_paged/            copied, and the bodies that are the idea taken out
                         └─> learn/phase6/phase6_paged/
make check PHASE=6     tests/phase6_paged/      run with that package in the place of the real one
                         └─> what holds, what does not, what is not written yet, and a hint
```

What is taken out, which tests belong to which idea, and the hints are in `learn.toml`, beside each phase's tests.
"""
