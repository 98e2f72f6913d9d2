"""Drills: the mesh under what takes minutes and a machine, run by hand. `make drill-…` runs one.

A drill starts a mesh of its own as people do, puts it to work, prints what was asked beside what was reached, and
ends with status 1 when they differ. Everything it makes is below `build/drills`, and gone when it ends, but for
logs and pictures.
"""
