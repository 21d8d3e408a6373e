"""What waits outside of the device's memory: optimizer states, and the float32 weights that they belong to, in host
memory or in files."""
