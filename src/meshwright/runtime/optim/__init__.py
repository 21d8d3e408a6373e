"""Runs the optimizer step on sharded parameters: the updater, updates of full tensors, optimizer groups, and the probe
of an optimizer's update rule."""
