"""The shipped winners, rendered by `flashtune generate`: reviewed as text, never edited by hand."""
