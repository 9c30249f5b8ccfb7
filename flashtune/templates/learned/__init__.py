"""What trials of like problems and configs say of the cost model's errors."""
