"""Search from a plan to its results: problem after problem, each with its trials and closing races."""
