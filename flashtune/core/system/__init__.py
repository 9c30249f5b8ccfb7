"""Files, folders, threads and errors: what every package needs of the machine."""
