"""The update of flat units: in which type it is computed, what of it is kept, and which rules need whole tensors.

`step.py` updates one unit after the other. `rounding.py` and `lean.py` keep weights and states in fewer bytes than they
are computed in;
`door.py` finds out what kind of rule an optimizer follows; `whole.py` gives whole tensors to those that need them.
"""
