"""The optimizer step of sharded parameters: full-tensor updates, parameter groups, and the probe of an optimizer's
update rule."""
