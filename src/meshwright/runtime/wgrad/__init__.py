"""Weight gradients: deferred to a separate action of the schedule, or accumulated in place."""
