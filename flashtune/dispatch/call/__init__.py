"""A call as its arguments say it: read, checked, and inspected."""
