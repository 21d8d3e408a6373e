"""Pipeline parallelism: the stages of an unmodified model, and the runner of a schedule over ranks."""
