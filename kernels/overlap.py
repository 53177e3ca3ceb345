"""Lets a kernel start on a GPU while the kernel before it still runs.

Kernels of a stream run one after the other: a kernel starts when the last program of the kernel before has ended.
Starting it takes the GPU about a microsecond. A decode step of a small model has 150 kernels of a few microseconds
each, so their starts add up.

NVIDIA GPUs from compute capability 9.0 on can start a kernel early ("programmatic dependent launch"):

```text
ordinary launches    kernel A   | start | compute |
                     kernel B                     | start | compute |

early launches       kernel A   | start | compute |
                     kernel B           | start | wait | compute |
```

Each kernel first waits (`wait_for_inputs`), and only then reads or writes memory. The wait ends when the kernel
before has ended and its writes can be read. That kernel has waited, too, so all kernels before it have ended.

On an NVIDIA H200, a step of phase 9 for one sequence of Llama 3.2 1B took 1.02 ms with ordinary launches and 0.97
ms with early ones.
"""

from __future__ import annotations

import functools

import torch

from kernels.dispatch import HAS_TRITON

if HAS_TRITON:
    import triton
    import triton.language as tl
    from triton.language.extra import cuda

    @triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
    def wait_for_inputs(early: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton has no types
        """Wait for the kernel before, then let the kernel after start. Does nothing unless `early`.

        The first statement of every kernel that is launched with `early_launch`.
        """
        if early:
            cuda.gdc_wait()
            cuda.gdc_launch_dependents()


@functools.cache
def early_launch(device: torch.device) -> dict[str, bool]:
    """Return arguments of a launch on `device` that start the kernel early, if the device can.

    Returns:
        The kernel's constant `early`, and Triton's option `launch_pdl` if the device can.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return {"early": False}
    can = torch.cuda.get_device_capability(device) >= (9, 0)
    return {"early": True, "launch_pdl": True} if can else {"early": False}
