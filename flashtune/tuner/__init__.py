"""Search: propose candidates, compile them, verify and time them, and save the best."""
