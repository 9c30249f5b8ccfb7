"""From a plan to its results: problem after problem, and of each its trials and closing races."""
