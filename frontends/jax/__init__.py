"""JAX frontend: capture as a jaxpr, lower lax primitives to the shared IR."""

if __name__ != "plait.frontends.jax":
    raise ImportError(
        f"import plait.frontends.jax, not {__name__}: this folder is a part of the package plait"
    )
