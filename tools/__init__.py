"""Tools of the repository: setting up, a first search, the newest PyTorch, and what the site makes of the repository."""
