"""Tuned database: schema, migrations, the store that reads and writes one file or server, and the library of layers."""
