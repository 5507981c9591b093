"""A timeline as a small text picture: a row a rank, time to the right, dots where a rank idles."""

from plait.core_ir.schedule.kinds import IS_COMPUTE, OPT
from plait.core_ir.schedule.timeline import TimedAction, Timeline

_MAX_COLUMNS = 400


def draw(timeline: Timeline, max_columns: int = _MAX_COLUMNS) -> str:
    """Every task as kind and microbatch, as long as it takes; the stage too where a rank has
    several.

        rank 0  F0 F1 ..... B0... B1...
        rank 1  ...F0 B0... F1 B1......

    The shortest task gets the width of the longest label unless that takes more than `max_columns`;
    labels that do not fit are cut.
    """
    tasks = [task for task in timeline.tasks if task.end > task.start]
    if not tasks:
        return ""
    several = len(set(timeline.schedule.placement)) < timeline.schedule.num_stages
    labels = [_label(task, several) for task in tasks]
    shortest = min(task.end - task.start for task in tasks)
    origin = min(task.start for task in tasks)
    scale = (max(map(len, labels)) + 1) / shortest
    scale = min(scale, max_columns / timeline.makespan)
    width = round(timeline.makespan * scale)
    rows = [["."] * width for _ in range(timeline.schedule.num_ranks)]
    for task, label in zip(tasks, labels, strict=True):
        begin, end = round((task.start - origin) * scale), round((task.end - origin) * scale)
        # A blank behind each task keeps neighbours apart.
        body = f"{label[: max(end - begin - 1, 0)]:<{end - begin}}"
        rows[task.rank][begin:end] = body
    head = len(f"rank {len(rows) - 1}")
    return "\n".join(
        f"{f'rank {rank}':<{head}}  {''.join(row)}".rstrip() for rank, row in enumerate(rows)
    )


def _label(task: TimedAction, several: bool) -> str:
    action = task.action
    if not IS_COMPUTE[action.kind.code]:
        return "OPT" if action.kind is OPT else str(action)
    parts = [f"{p.stage if several else ''}{p.kind}{p.microbatch}" for p in action.parts]
    return "&".join(parts)
