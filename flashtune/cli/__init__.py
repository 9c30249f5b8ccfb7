"""The command line: thin commands, and the only room that prints."""
