"""What serves calls that are alike, everything decided: plans, and how a call finds its own."""
