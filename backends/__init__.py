"""Backends: emit the tasks of the shared IR, compile them, run a schedule."""

if __name__ != "plait.backends":
    raise ImportError(
        f"import plait.backends, not {__name__}: this folder is a part of the package plait"
    )
