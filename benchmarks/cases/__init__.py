"""Cases: one module each, whose `main` reads its options from the command line."""
