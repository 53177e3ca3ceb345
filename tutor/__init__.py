"""Exercises: files of a phase (or of a kernel) without the function bodies that implement its idea.

You write the bodies. The phase's tests judge what you write.

```text
make learn PHASE=6     phase6_paged/scheduler.py …  copied, without some bodies
                         └─> learn/phase6/phase6_paged/scheduler.py …
make check PHASE=6     tests/phase6_paged/          run with the copies in place of these modules (`tutor.overlay`)
make serve LEARN=6     python -m phase6_paged       served with the copies in place
make compare LEARN=6   infer compare                with both beside each other
make step LEARN=6      the stepper's page           with the copy as a further phase
```

`learn.toml`, beside each phase's tests, lists the bodies to remove, the tests of each idea, and hints.
"""
