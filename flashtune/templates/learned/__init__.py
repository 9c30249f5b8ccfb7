"""Residuals of the cost model, learned from trials of similar problems and configs."""
