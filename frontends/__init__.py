"""Frontends: capture a model of a framework and lower it to the shared IR."""

if __name__ != "plait.frontends":
    raise ImportError(
        f"import plait.frontends, not {__name__}: this folder is a part of the package plait"
    )
