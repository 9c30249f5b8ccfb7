"""One file per schema version. A released one never changes; each has a database in tests/fixtures/db."""
