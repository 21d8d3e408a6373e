"""meshwright.runtime.comm.shm."""
