"""Tensor-parallel rules, one file for each type of layer.

To add a rule, add a file that defines `RULE`, an instance of a subclass of `LayerRule`. Analysis, the checks on one
process and the tensor-parallel runtime find it with `rule_of`. Which operations may follow a split layer is in
`analysis/propagation.py`.
"""
