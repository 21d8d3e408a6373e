"""Contains the preflight checks: before a training step counts, they verify that the plan computes what one device
would compute."""
