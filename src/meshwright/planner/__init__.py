"""meshwright.planner."""
