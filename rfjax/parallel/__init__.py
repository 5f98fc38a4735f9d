"""One model on several devices: the mesh, what lies where, and attention across it."""

from rfjax.parallel.mesh import Layout, make_mesh

__all__ = ["Layout", "make_mesh"]
