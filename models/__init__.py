"""Example models, each in PyTorch and in Flax with the same names; they know no compiler."""

if __name__ != "plait.models":
    raise ImportError(
        f"import plait.models, not {__name__}: this folder is a part of the package plait"
    )
