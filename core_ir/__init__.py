"""The shared dataflow IR: types, ops, graphs, passes, schedules. Knows no framework."""

if __name__ != "plait.core_ir":
    raise ImportError(
        f"import plait.core_ir, not {__name__}: this folder is a part of the package plait"
    )
