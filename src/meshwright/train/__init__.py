"""One optimizer step over the mesh, and the loop around it."""
