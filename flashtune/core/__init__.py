"""The vocabulary every other room speaks: problem, target, config, variant, results, tolerances, errors."""
