"""Pipeline parallelism: one unmodified model as stages that play a schedule over real ranks."""
