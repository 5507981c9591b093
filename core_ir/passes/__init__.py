"""Passes: graph(s) in, new graph(s) out, valid at every border; a file each, named as the pass.

`pipeline.py` lists the order in which they run; the files named by a noun hold what several passes share.
"""
