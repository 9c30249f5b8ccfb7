"""Plans: prepared execution of calls with equal signatures, and the cache in which a call finds its own."""
