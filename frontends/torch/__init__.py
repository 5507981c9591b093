"""PyTorch frontend: capture with AOTAutograd, lower aten ops to the shared IR."""

if __name__ != "plait.frontends.torch":
    raise ImportError(
        f"import plait.frontends.torch, not {__name__}: this folder is a part of the package plait"
    )
