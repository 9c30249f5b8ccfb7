"""Child processes, and what they run: compile, check and time a candidate."""
