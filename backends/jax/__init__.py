"""JAX backend: emit lax, compile with XLA, run as one program or as one per task."""

if __name__ != "plait.backends.jax":
    raise ImportError(
        f"import plait.backends.jax, not {__name__}: this folder is a part of the package plait"
    )
