"""PyTorch backend: emit aten graphs, compile with Inductor, run on torch.distributed."""

if __name__ != "plait.backends.torch":
    raise ImportError(
        f"import plait.backends.torch, not {__name__}: this folder is a part of the package plait"
    )
