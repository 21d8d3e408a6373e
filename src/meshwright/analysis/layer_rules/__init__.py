"""Defines how tensor parallelism splits layers, one file for each type of layer. The analysis, its numeric checks and
the tensor-parallel runtime find the rule of a layer through `rule_of`.

To add a rule, add a file that defines `RULE`, an instance of a subclass of `LayerRule`. `analysis/propagation.py`
defines which operations may follow a split layer.
"""
