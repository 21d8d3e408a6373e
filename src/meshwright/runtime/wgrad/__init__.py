"""Weight gradients: deferred to a separate action of the schedule (W), or accumulated in place."""
