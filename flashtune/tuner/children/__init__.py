"""Child processes and their tasks: compile, check and time a candidate."""
