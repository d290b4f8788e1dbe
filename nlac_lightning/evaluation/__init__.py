"""Playing held-out tasks, and what is recorded of it."""
