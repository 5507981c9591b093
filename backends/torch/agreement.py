"""Agreement of ranks: what one rank met, every rank raises, before any message of a step is sent."""

import torch
import torch.distributed as dist

from plait.core_ir.errors import ExecutionError, PlaitError, UsageError


def agree_on(error: Exception | None, device: torch.device) -> None:
    """Raise `error` here, and on every other rank an error of the same class that names this rank.

    A collective call: every rank makes it. It costs one reduction of a single number when all is well.
    """
    failed = torch.tensor([error is not None], dtype=torch.int32, device=device)
    dist.all_reduce(failed)
    if not int(failed.item()):
        return
    messages: list[tuple[type[PlaitError], str] | None] = [None] * dist.get_world_size()
    own = None
    if error is not None:
        kind = type(error) if isinstance(error, PlaitError) else ExecutionError
        own = (kind, str(error))
    dist.all_gather_object(messages, own)
    if error is not None:
        raise error
    rank, (kind, text) = next((r, m) for r, m in enumerate(messages) if m is not None)
    raise kind(f"rank {rank}: {text}")


def agree_on_text(text: str, what: str) -> None:
    """UsageError on every rank unless all ranks pass the same text; names the ranks that differ from rank 0."""
    texts: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(texts, text)
    different = [rank for rank, other in enumerate(texts) if other != texts[0]]
    if different:
        lines = zip(texts[0].splitlines(), texts[different[0]].splitlines(), strict=False)
        first = next(((a, b) for a, b in lines if a != b), ("", ""))
        raise UsageError(
            f"ranks {different} built another {what} than rank 0; first difference: rank 0 has {first[0]!r}, rank "
            f"{different[0]} has {first[1]!r}; every rank must compile the same model, batch and options"
        )
