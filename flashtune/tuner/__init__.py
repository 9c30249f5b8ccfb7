"""Search: propose candidates, compile them, prove them right, time them, keep the best."""
