"""Tensor-parallel rules, one file for each type of layer.

To add a rule, add a file that defines `RULE`, an instance of a subclass of `LayerRule`. The analysis, the
single-process checks and the tensor-parallel runtime find the rule through `rule_of`. `analysis/propagation.py` defines
which operations may follow a split layer.
"""
