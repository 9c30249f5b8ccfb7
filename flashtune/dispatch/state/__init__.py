"""State of dispatch: the databases in force with their plans and failures, a frozen plan, and calls that are recorded."""
