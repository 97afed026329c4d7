"""The energy of training: sensors of the machine, and records of external power meters."""
