"""The passes of the build, one file each; build/parallelize.py lists them in order."""
