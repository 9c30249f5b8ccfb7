"""Resolution of a call: the databases in force, and the plans that may serve, best first."""
