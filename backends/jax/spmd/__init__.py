"""The parts of the `spmd` engine: one program for all ranks, driven by a table.

Values that outlive a task stand in pools. `layout` says how unlike bundles of arrays share a pool's fields, `wiring`
which port of which task stands in which pool, `ticks` when each task runs, `slots` which row of a pool it uses, `plan`
writes all that into the table, `program` is the traced program, `staging` carries arrays in and out.
"""

if __name__ != "plait.backends.jax.spmd":
    raise ImportError(
        f"import plait.backends.jax.spmd, not {__name__}: this folder is a part of the package plait"
    )
