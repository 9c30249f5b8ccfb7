"""What becomes of winners: source text again, machine code, the shipped folder and the user's cache."""
