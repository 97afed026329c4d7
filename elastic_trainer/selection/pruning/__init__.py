"""PruneTrain: a scheme that trains every tensor, and removes channels meanwhile."""
