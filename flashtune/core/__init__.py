"""The types that every other package uses: problem, target, config, variant, results, tolerances, errors."""
