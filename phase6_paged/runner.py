"""Nothing new: the flat pass finds keys through a block table, and always did.

Phase 5's slot was a table of one long block. What changes lies below: on CUDA, decode reads the blocks where they
are (`kernels.paged_attention`), and a CPU's native kernel walks the table; elsewhere torch gathers them, with
indices built once a pass.
"""

from __future__ import annotations

from phase5_continuous.runner import ContinuousRunner


class PagedRunner(ContinuousRunner):
    """Phase 5's runner, on either pool."""
