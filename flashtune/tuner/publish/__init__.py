"""Publication of winners: source text, machine code, the shipped folder and the user's cache."""
