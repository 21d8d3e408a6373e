"""One optimizer step, the loop around it, and the processes that run it. Importing this imports no torch."""
