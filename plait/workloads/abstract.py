"""A workload to look at rather than to run: a named model without weights, or a user's own as it is built."""

import re
import traceback
from collections.abc import Sequence

from plait.core_ir.errors import PlaitError, UsageError
from plait.workloads.workload import Sizes, Workload, is_named, load_workload


def load_abstract(
    model: str, frontend: str | None, sizes: Sizes, split: Sequence[str] | None
) -> Workload:
    """The workload; UsageError, on one line, for whatever the user's module or its `build` raises."""
    try:
        return load_workload(model, frontend, sizes, split, abstract=is_named(model))
    except PlaitError:
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        own = [f for f in frames if not re.search(r"site-packages|^<frozen", f.filename)]
        frame = [*frames, *own][-1]
        raised = " ".join(f"{type(error).__name__}: {error}".split())
        raise UsageError(f"{model} raised {raised} ({frame.filename}:{frame.lineno})") from error
